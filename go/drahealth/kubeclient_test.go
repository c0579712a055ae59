// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"errors"
	"net/http"
	"syscall"
	"testing"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"

	pb "drahealth.example.com/go/drahealthv1"
)

// noClaims is an API server that has no claim: each fetch fails with err.
type noClaims struct {
	kubernetes.Interface
	resourceclient.ResourceV1Interface
	resourceclient.ResourceClaimInterface
	err error
}

func (n *noClaims) ResourceV1() resourceclient.ResourceV1Interface              { return n }
func (n *noClaims) ResourceClaims(string) resourceclient.ResourceClaimInterface { return n }
func (n *noClaims) Get(context.Context, string, metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	return nil, n.err
}

func fetch(ctx context.Context, c *Client, err error) error {
	client := c.KubeClient(&noClaims{err: err})
	_, err = client.ResourceV1().ResourceClaims("default").Get(ctx, "it", metav1.GetOptions{})
	return err
}

func TestFailedFetchOfAClaimHasTheAgentsText(t *testing.T) {
	claims := schema.GroupResource{Group: "resource.k8s.io", Resource: "resourceclaims"}
	for _, test := range []struct {
		err    error
		status int64
	}{
		{apierrors.NewNotFound(claims, "it"), http.StatusNotFound},
		{apierrors.NewForbidden(claims, "it", errors.New("no role")), http.StatusForbidden},
		{syscall.ECONNREFUSED, 0},
	} {
		withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
			var asked []*pb.Evidence
			a.classify = func(_ context.Context, request *pb.ClassifyRequest) (*pb.ClassifyReply, error) {
				asked = request.GetEvidence()
				return &pb.ClassifyReply{Verdict: &pb.PrepareVerdict{Text: "[class=transient]"}}, nil
			}
			a.start()
			err := fetch(ctx, c, test.err)
			if err == nil || err.Error() != "[class=transient]" || asked[0].GetHttp().GetStatus() != test.status {
				t.Errorf("error %v, not %v, after the calls %v", err, test.err, asked)
			}
			if apierrors.IsNotFound(err) {
				t.Errorf("the helper fetches the claim again: %v", err)
			}
			if test.status == 0 && (!errors.Is(err, syscall.ECONNREFUSED) || asked[0].GetErrno().GetOperation() != pb.Operation(OpAPI)) {
				t.Errorf("error %v after the calls %v", err, asked)
			}
		})
	}
}

func TestFailedFetchWithoutAgentKeepsItsError(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		if err := fetch(ctx, c, syscall.ECONNREFUSED); err != syscall.ECONNREFUSED {
			t.Errorf("without agent: %v", err)
		}
		a.start()
		time.Sleep(reconnectMax)
		if err := fetch(ctx, c, syscall.ECONNREFUSED); err != syscall.ECONNREFUSED || a.count("classify") != 1 {
			t.Errorf("with an older agent: %v, asked %v", err, a.asked)
		}
		a.classify = hangs[*pb.ClassifyRequest, *pb.ClassifyReply]
		for _, want := range []time.Duration{budget, 0} {
			began := time.Now()
			if err := fetch(ctx, c, syscall.ECONNREFUSED); err != syscall.ECONNREFUSED || time.Since(began) != want {
				t.Errorf("with a hung agent: %v after %v, not %v", err, time.Since(began), want)
			}
		}
	})
}

func TestMissingAPIVersionIsLeftToTheHelper(t *testing.T) {
	missing := apierrors.NewGenericServerResponse(http.StatusNotFound, "get", schema.GroupResource{}, "it", "404 page not found", 0, true)
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.start()
		if err := fetch(ctx, c, missing); err != error(missing) || a.count("classify") != 0 {
			t.Errorf("error %v after the calls %v", err, a.asked)
		}
	})
}
