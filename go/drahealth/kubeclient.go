// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"errors"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	resourceclient "k8s.io/client-go/kubernetes/typed/resource/v1"
	"k8s.io/client-go/util/watchlist"

	pb "drahealth.example.com/go/drahealthv1"
)

// KubeClient returns a client for kubeletplugin.KubeClient. The helper fetches the claims of a call before
// it calls PrepareResourceClaims, and fails the call if one cannot be fetched; with this client such an
// error has the agent's class and text, behind the helper's own. A fetch that fails waits for the agent
// for at most 500 ms, and not at all while the agent is known to be absent.
//
// Only errors of fetching a ResourceClaim change. The helper's own errors of a claim that is not allocated
// or was replaced have no class.
func (c *Client) KubeClient(client kubernetes.Interface) kubernetes.Interface {
	return &kubeClient{client, c}
}

type kubeClient struct {
	kubernetes.Interface
	agent *Client
}

func (k *kubeClient) ResourceV1() resourceclient.ResourceV1Interface {
	return &resourceClient{k.Interface.ResourceV1(), k.agent}
}

// IsWatchListSemanticsUnSupported forwards a property of fake clients.
func (k *kubeClient) IsWatchListSemanticsUnSupported() bool {
	return watchlist.DoesClientNotSupportWatchListSemantics(k.Interface)
}

type resourceClient struct {
	resourceclient.ResourceV1Interface
	agent *Client
}

func (r *resourceClient) ResourceClaims(namespace string) resourceclient.ResourceClaimInterface {
	return &claimClient{r.ResourceV1Interface.ResourceClaims(namespace), r.agent}
}

type claimClient struct {
	resourceclient.ResourceClaimInterface
	agent *Client
}

func (r *claimClient) Get(ctx context.Context, name string, options metav1.GetOptions) (*resourceapi.ResourceClaim, error) {
	claim, err := r.ResourceClaimInterface.Get(ctx, name, options)
	if err != nil {
		err = r.agent.classifyFetch(ctx, err)
	}
	return claim, err
}

// classifyFetch returns the error of a failed fetch with the agent's text, or unchanged without one.
func (c *Client) classifyFetch(ctx context.Context, err error) error {
	if apierrors.HasStatusCause(err, metav1.CauseTypeUnexpectedServerResponse) && apierrors.IsNotFound(err) {
		return err // an API server without resource.k8s.io/v1: the helper tries older versions
	}
	if ctx.Err() != nil || c.absent() {
		return err
	}
	timed, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	reply, failure := c.link.Classify(timed, &pb.ClassifyRequest{Evidence: evidenceOf(Doing(OpAPI, err))})
	c.noteAnswer(ctx, failure)
	if reply.GetVerdict().GetText() == "" {
		return err
	}
	classified := newError(reply.GetVerdict(), err)
	if apierrors.IsNotFound(err) {
		// The helper would take a claim that does not exist for a missing version of the API, and return
		// the error of the oldest version.
		return errors.New(classified.Error())
	}
	return classified
}
