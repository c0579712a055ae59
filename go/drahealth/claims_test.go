// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"errors"
	"fmt"
	"net"
	"reflect"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	"github.com/go-logr/logr/funcr"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	pb "drahealth.example.com/go/drahealthv1"
)

func claim(uid string) *resourceapi.ResourceClaim {
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "claim-" + uid, UID: types.UID(uid)},
		Status: resourceapi.ResourceClaimStatus{Allocation: &resourceapi.AllocationResult{
			Devices: resourceapi.DeviceAllocationResult{Results: []resourceapi.DeviceRequestAllocationResult{
				{Request: "r", Driver: driverName, Pool: "node-1", Device: "dev-" + uid},
				{Request: "other", Driver: "other.example.com", Pool: "node-1", Device: "theirs"},
			}},
		}},
	}
}

func claims(uids ...string) (all []*resourceapi.ResourceClaim) {
	for _, uid := range uids {
		all = append(all, claim(uid))
	}
	return all
}

// answerReport answers a report with a verdict for each failed claim except "dead".
func answerReport(_ context.Context, request *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
	reply := &pb.ReportPrepareReply{}
	for _, outcome := range request.GetOutcomes() {
		answer := &pb.ClaimAnswer{Uid: outcome.GetClaim().GetUid()}
		if outcome.GetFailed() && answer.GetUid() != "dead" {
			answer.Verdict = &pb.PrepareVerdict{Text: "[class=transient] " + answer.GetUid()}
		}
		reply.Answers = append(reply.Answers, answer)
	}
	return reply, nil
}

// recordReport makes the agent answer reports with answerReport, and returns a function that returns the last report.
func (a *fakeAgent) recordReport() func() *pb.ReportPrepareRequest {
	var reported *pb.ReportPrepareRequest
	a.report = func(ctx context.Context, request *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
		reported = request
		return answerReport(ctx, request)
	}
	return func() *pb.ReportPrepareRequest { return reported }
}

func noBlockers(context.Context, *pb.CheckClaimsRequest) (*pb.CheckClaimsReply, error) {
	return &pb.CheckClaimsReply{}, nil
}

func hangs[Request, Reply any](ctx context.Context, _ Request) (reply Reply, _ error) {
	<-ctx.Done()
	return reply, ctx.Err()
}

// prepares returns a prepare function that fails for all claims except the named ones.
func prepares(well ...string) func(context.Context, *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	return func(_ context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
		if slices.Contains(well, string(claim.UID)) {
			return []kubeletplugin.Device{{DeviceName: "dev-" + string(claim.UID)}}, nil
		}
		return nil, errors.New("driver's own: " + string(claim.UID))
	}
}

func errorsOf(results map[types.UID]kubeletplugin.PrepareResult) map[string]string {
	texts := map[string]string{}
	for uid, result := range results {
		texts[string(uid)] = ""
		if result.Err != nil {
			texts[string(uid)] = result.Err.Error()
		}
	}
	return texts
}

func expectErrors(t *testing.T, results map[types.UID]kubeletplugin.PrepareResult, want map[string]string) {
	t.Helper()
	got := errorsOf(results)
	if len(got) != len(want) {
		t.Errorf("the result is %v, not %v", got, want)
	}
	for uid, text := range want {
		if actual, has := got[uid]; !has || actual != text {
			t.Errorf("claim %s: %q, not %q", uid, actual, text)
		}
	}
}

func TestPrepareErrorHasTheAgentsText(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var asked *pb.CheckClaimsRequest
		a.check = func(_ context.Context, request *pb.CheckClaimsRequest) (*pb.CheckClaimsReply, error) {
			asked = request
			return &pb.CheckClaimsReply{Answers: []*pb.ClaimAnswer{
				{Uid: "well"}, {Uid: "bad"}, {Uid: "known", Verdict: &pb.PrepareVerdict{Text: "[class=bad-config]"}},
			}}, nil
		}
		reported := a.recordReport()
		a.start()
		var tried []string
		results, err := c.Prepare(ctx, claims("well", "bad", "known"),
			func(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
				tried = append(tried, string(claim.UID))
				return prepares("well")(ctx, claim)
			})
		if err != nil {
			t.Fatal(err)
		}
		expectErrors(t, results, map[string]string{"well": "", "bad": "[class=transient] bad", "known": "[class=bad-config]"})
		if !slices.Equal(tried, []string{"well", "bad"}) {
			t.Errorf("tried %v: expected exactly the claims without a known blocker", tried)
		}
		if len(asked.GetClaims()) != 3 || a.count("check") != 1 || a.count("report") != 1 {
			t.Errorf("unexpected calls of the agent: %v", a.asked)
		}
		if outcomes := reported().GetOutcomes(); len(outcomes) != 2 || outcomes[0].GetFailed() || !outcomes[1].GetFailed() ||
			outcomes[1].GetEvidence()[0].GetText() != "driver's own: bad" {
			t.Errorf("unexpected reports: %v", outcomes)
		}
		var own *Error
		if !errors.As(results["bad"].Err, &own) || own.Unwrap().Error() != "driver's own: bad" {
			t.Errorf("%v hides the driver's own error", results["bad"].Err)
		}
	})
}

func TestClaimIsTriedDespiteFaultsThatItAccepts(t *testing.T) {
	tolerates := func(effects ...resourceapi.DeviceTaintEffect) resourceapi.DeviceRequestAllocationResult {
		result := claim("it").Status.Allocation.Devices.Results[0]
		for _, effect := range effects {
			result.Tolerations = append(result.Tolerations, resourceapi.DeviceToleration{Effect: effect})
		}
		return result
	}
	admin, plain, other := tolerates(), tolerates(), claim("it").Status.Allocation.Devices.Results[1]
	admin.AdminAccess, plain.AdminAccess = new(true), new(false)
	for name, test := range map[string]struct {
		results []resourceapi.DeviceRequestAllocationResult
		want    bool
	}{
		"admin access":      {[]resourceapi.DeviceRequestAllocationResult{admin, other}, true},
		"any effect":        {[]resourceapi.DeviceRequestAllocationResult{tolerates("")}, true},
		"NoSchedule":        {[]resourceapi.DeviceRequestAllocationResult{tolerates("None", "NoSchedule")}, true},
		"NoExecute":         {[]resourceapi.DeviceRequestAllocationResult{tolerates("NoExecute"), admin}, true},
		"None":              {[]resourceapi.DeviceRequestAllocationResult{tolerates("None")}, false},
		"no admin access":   {[]resourceapi.DeviceRequestAllocationResult{plain}, false},
		"one of two":        {[]resourceapi.DeviceRequestAllocationResult{admin, plain}, false},
		"no driver's":       {[]resourceapi.DeviceRequestAllocationResult{other}, false},
		"without a device":  {nil, false},
		"without a setting": {[]resourceapi.DeviceRequestAllocationResult{tolerates()}, false},
	} {
		withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
			a.check = func(_ context.Context, request *pb.CheckClaimsRequest) (*pb.CheckClaimsReply, error) {
				reply := &pb.CheckClaimsReply{}
				for _, claim := range request.GetClaims() {
					verdict := &pb.PrepareVerdict{Text: "known"}
					reply.Answers = append(reply.Answers, &pb.ClaimAnswer{Uid: claim.GetUid(), Verdict: verdict})
				}
				return reply, nil
			}
			a.report = answerReport
			a.start()
			accepts := claim("it")
			accepts.Status.Allocation.Devices.Results = test.results
			tried := false
			_, _ = c.Prepare(ctx, []*resourceapi.ResourceClaim{claim("blocked"), accepts},
				func(_ context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
					tried = tried || claim.UID == "it"
					return nil, nil
				})
			if tried != test.want {
				t.Errorf("%s: tried: %t", name, tried)
			}
		})
	}
}

func TestErrorsOfOneCallNameClaimsThatWereNotTried(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check = func(context.Context, *pb.CheckClaimsRequest) (*pb.CheckClaimsReply, error) {
			verdict := &pb.PrepareVerdict{Text: "known"}
			return &pb.CheckClaimsReply{Answers: []*pb.ClaimAnswer{
				{Uid: "known", Verdict: verdict}, {Uid: "older", Verdict: verdict}, {Uid: "retried", Verdict: verdict},
			}}, nil
		}
		var asked *pb.ReportPrepareRequest
		a.report = func(_ context.Context, request *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
			asked = request
			return &pb.ReportPrepareReply{Answers: []*pb.ClaimAnswer{
				{Uid: "bad", Verdict: &pb.PrepareVerdict{Text: "bad, known"}}, {Uid: "retried"},
				{Uid: "known", Verdict: &pb.PrepareVerdict{Text: "known, bad"}},
			}}, nil
		}
		a.start()
		all := claims("bad", "known", "older", "retried")
		call := c.StartPrepare(ctx, all)
		for _, claim := range all[1:] {
			if err := call.Check(claim); err == nil || err.Error() != "known" {
				t.Errorf("claim %s: %v", claim.UID, err)
			}
		}
		call.Fail(all[0], errors.New("driver's own"))
		call.Done(all[3])
		if err := call.Check(all[3]); err == nil {
			t.Error("a claim that was tried has no known error")
		}
		results := map[types.UID]kubeletplugin.PrepareResult{}
		for uid, err := range call.Report() {
			results[uid] = kubeletplugin.PrepareResult{Err: err}
		}
		expectErrors(t, results, map[string]string{"bad": "bad, known", "known": "known, bad", "older": "known"})
		if blocked := slices.Sorted(slices.Values(asked.GetBlockedUids())); !slices.Equal(blocked, []string{"known", "older"}) {
			t.Errorf("claims that were not tried: %q", blocked)
		}
	})
}

func TestPrepareErrorHasTheAgentsRepair(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check = func(context.Context, *pb.CheckClaimsRequest) (*pb.CheckClaimsReply, error) {
			verdict := &pb.PrepareVerdict{Text: "lost", Repair: pb.DeviceRepair_DEVICE_REPAIR_REBOOT_NODE}
			return &pb.CheckClaimsReply{Answers: []*pb.ClaimAnswer{{Uid: "lost", Verdict: verdict}, {Uid: "bad"}}}, nil
		}
		a.report = hangs[*pb.ReportPrepareRequest, *pb.ReportPrepareReply]
		a.start()
		results, err := c.Prepare(ctx, claims("lost", "bad"), prepares())
		if err != nil {
			t.Fatal(err)
		}
		for uid, want := range map[string]Repair{"lost": RepairRebootNode, "bad": RepairNone} {
			var own *Error
			if !errors.As(results[types.UID(uid)].Err, &own) || own.Repair() != want {
				t.Errorf("claim %s: %v has not the repair %v", uid, results[types.UID(uid)].Err, want)
			}
		}
	})
}

func TestPrepareWithHungAgentWaitsForTheBudgetOnce(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check, a.report = hangs[*pb.CheckClaimsRequest, *pb.CheckClaimsReply], hangs[*pb.ReportPrepareRequest, *pb.ReportPrepareReply]
		a.start()
		for _, want := range []time.Duration{budget, 0, 0} {
			began := time.Now()
			results, _ := c.Prepare(ctx, claims("bad", "well"), prepares("well"))
			if took := time.Since(began); took != want {
				t.Errorf("waited for %v, not %v", took, want)
			}
			expectErrors(t, results, map[string]string{"bad": "driver's own: bad", "well": ""})
		}
	})
}

func TestCheckAndReportShareOneBudget(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check = func(context.Context, *pb.CheckClaimsRequest) (*pb.CheckClaimsReply, error) {
			time.Sleep(400 * time.Millisecond)
			return &pb.CheckClaimsReply{}, nil
		}
		a.report = hangs[*pb.ReportPrepareRequest, *pb.ReportPrepareReply]
		a.start()
		began := time.Now()
		_, _ = c.Prepare(ctx, claims("bad"), prepares())
		if took := time.Since(began); took != budget {
			t.Errorf("waited for %v, not %v", took, budget)
		}
	})
}

func TestDriversWorkDoesNotUseTheBudget(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check, a.report = noBlockers, answerReport
		a.start()
		results, _ := c.Prepare(ctx, claims("bad"), func(context.Context, *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
			time.Sleep(30 * time.Second)
			return nil, errors.New("driver's own")
		})
		expectErrors(t, results, map[string]string{"bad": "[class=transient] bad"})
	})
}

func TestSuccessIsReportedWithoutWaiting(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check, a.report = noBlockers, hangs[*pb.ReportPrepareRequest, *pb.ReportPrepareReply]
		a.start()
		began := time.Now()
		_, _ = c.Prepare(ctx, claims("well"), prepares("well"))
		_, _ = c.Unprepare(ctx, objects("well"), unprepares)
		if took := time.Since(began); took != 0 {
			t.Errorf("the call took %v", took)
		}
		synctest.Wait()
		if a.count("report") != 1 { // the second is sent after the first has ended
			t.Errorf("unexpected calls of the agent: %v", a.asked)
		}
	})
}

func TestSuccessIsReportedBeforeTheClientIsClosed(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check, a.report = noBlockers, answerReport
		a.start()
		_, _ = c.Prepare(ctx, claims("well"), prepares("well"))
		began := time.Now()
		c.Close()
		if count, took := a.count("report"), time.Since(began); count != 1 || c.Undelivered() != 0 || took > 0 {
			t.Errorf("%d reports, %d undelivered, after %s", count, c.Undelivered(), took)
		}
	})
}

func TestHungAgentDelaysCloseForTheBudget(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check, a.report = noBlockers, hangs
		a.start()
		_, _ = c.Prepare(ctx, claims("well"), prepares("well"))
		began := time.Now()
		c.Close()
		if took := time.Since(began); took != budget {
			t.Errorf("closed after %s", took)
		}
	})
}

func TestHungAgentIsLeftForItsReplacement(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check, a.report = hangs[*pb.CheckClaimsRequest, *pb.CheckClaimsReply], hangs[*pb.ReportPrepareRequest, *pb.ReportPrepareReply]
		a.start()
		_, _ = c.Prepare(ctx, claims("bad"), prepares())
		old := a.server
		defer old.Stop()
		next := &fakeAgent{check: noBlockers, report: answerReport}
		next.start()
		defer next.stop()
		a.mu.Lock()
		a.listener = next.listener
		a.mu.Unlock()
		time.Sleep(2 * reportTimeout)
		results, _ := c.Prepare(ctx, claims("bad"), prepares())
		expectErrors(t, results, map[string]string{"bad": "[class=transient] bad"})
	})
}

func TestPrepareWithAbsentAgentDoesNotWait(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		began := time.Now()
		for range 3 {
			results, _ := c.Prepare(ctx, claims("bad", "well"), prepares("well"))
			expectErrors(t, results, map[string]string{"bad": "driver's own: bad", "well": ""})
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("the call took %v", took)
		}
	})
}

func TestPrepareWithClosedClientDoesNotWait(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.start()
		c.Close()
		began := time.Now()
		_, _ = c.Prepare(ctx, claims("bad"), prepares())
		if took := time.Since(began); took != 0 {
			t.Errorf("the call took %v", took)
		}
	})
}

func TestPrepareWithOlderAgentUsesDriversErrors(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.start()
		results, _ := c.Prepare(ctx, claims("bad", "well"), prepares("well"))
		expectErrors(t, results, map[string]string{"bad": "driver's own: bad", "well": ""})
		synctest.Wait()
		if c.Undelivered() != 0 {
			t.Errorf("%d claims are undelivered to an agent without reports", c.Undelivered())
		}
	})
}

func TestReportsToAbsentAgentAreSentLaterNewestLast(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var reports []string
		a.check = noBlockers
		a.report = func(ctx context.Context, request *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
			for _, outcome := range request.GetOutcomes() {
				reports = append(reports, outcome.GetClaim().GetUid()+map[bool]string{true: " failed", false: " succeeded"}[outcome.GetFailed()])
			}
			return answerReport(ctx, request)
		}
		_, _ = c.Prepare(ctx, claims("first"), prepares()) // already being sent, so that newer reports do not replace it
		synctest.Wait()
		_, _ = c.Prepare(ctx, claims("a", "b"), prepares())
		_, _ = c.Prepare(ctx, claims("a"), prepares("a"))
		time.Sleep(20 * time.Second)
		a.start()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if want := []string{"first failed", "b failed", "a succeeded"}; !slices.Equal(reports, want) {
			t.Errorf("the agent received %v, not %v", reports, want)
		}
		if c.Undelivered() != 0 {
			t.Errorf("%d delivered claims are counted as undelivered", c.Undelivered())
		}
	})
}

func TestQueuedPrepareResultIsSentBeforeAQueuedUnprepareOfItsClaim(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var reports []string
		a.report = func(ctx context.Context, request *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
			for _, outcome := range request.GetOutcomes() {
				reports = append(reports, outcome.GetClaim().GetUid()+" "+request.GetStep().String())
			}
			return answerReport(ctx, request)
		}
		_, _ = c.Prepare(ctx, claims("first"), prepares()) // already being sent
		synctest.Wait()
		_, _ = c.Prepare(ctx, claims("a"), prepares("a"))
		_, _ = c.Unprepare(ctx, []kubeletplugin.NamespacedObject{{UID: "a"}},
			func(context.Context, kubeletplugin.NamespacedObject) error { return nil })
		a.start()
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if want := []string{"first STEP_PREPARE", "a STEP_PREPARE", "a STEP_UNPREPARE"}; !slices.Equal(reports, want) {
			t.Errorf("the agent received %v, not %v", reports, want)
		}
	})
}

func TestReportInterruptedByAgentStopIsSentAgain(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check = noBlockers
		a.report = func(ctx context.Context, request *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
			if a.count("report") == 1 {
				return hangs[*pb.ReportPrepareRequest, *pb.ReportPrepareReply](ctx, request)
			}
			return answerReport(ctx, request)
		}
		a.start()
		_, _ = c.Prepare(ctx, claims("bad"), prepares())
		a.stop()
		time.Sleep(20 * second)
		a.start()
		time.Sleep(2 * second)
		synctest.Wait()
		if a.count("report") != 2 || c.Undelivered() != 0 {
			t.Errorf("reported %d times, %d claims undelivered", a.count("report"), c.Undelivered())
		}
	})
}

func TestReportRefusedAsUnavailableIsTriedTwice(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check = noBlockers
		a.report = func(context.Context, *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
			return nil, status.Error(codes.Unavailable, "no space left on device")
		}
		a.start()
		_, _ = c.Prepare(ctx, claims("bad"), prepares())
		time.Sleep(time.Hour)
		if a.count("report") != 2 || c.Undelivered() != 1 {
			t.Errorf("reported %d times, %d claims undelivered", a.count("report"), c.Undelivered())
		}
	})
}

func TestExpiredReportsCloseNoConnection(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		dialed := 0
		c.dial = func(ctx context.Context) (net.Conn, error) {
			dialed++
			return a.dial(ctx)
		}
		a.check, a.report = noBlockers, hangs[*pb.ReportPrepareRequest, *pb.ReportPrepareReply]
		a.start()
		for _, uid := range []string{"a", "b", "c"} {
			_, _ = c.Prepare(ctx, claims(uid), prepares(uid))
			time.Sleep(second)
		}
		time.Sleep(2 * reportTimeout)
		_, _ = c.Prepare(ctx, claims("d"), prepares("d"))
		if dialed != 2 || c.Undelivered() != 3 {
			t.Errorf("%d connections, %d claims are counted", dialed, c.Undelivered())
		}
	})
}

func TestUndeliveredReportsAreCountedAndLimited(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		for number := range 2 * reportsMax {
			_, _ = c.Prepare(ctx, claims(strings.Repeat("x", number+1)), prepares())
		}
		c.reports.mu.Lock()
		waiting := len(c.reports.waiting)
		c.reports.mu.Unlock()
		if waiting > reportsMax {
			t.Errorf("%d reports wait, limit %d", waiting, reportsMax)
		}
		time.Sleep(2 * reportTimeout)
		if lost := c.Undelivered(); lost != 2*reportsMax {
			t.Errorf("%d of %d claims are counted", lost, 2*reportsMax)
		}
	})
}

func TestRefusedReportIsPassedToOnError(t *testing.T) {
	var complaints []error
	handle := OnError(func(_ context.Context, err error, _ string) { complaints = append(complaints, err) })
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check = noBlockers
		a.report = func(context.Context, *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
			return nil, status.Error(codes.InvalidArgument, "outcomes[0].claim.uid: empty")
		}
		a.start()
		results, _ := c.Prepare(ctx, claims("bad"), prepares())
		synctest.Wait()
		expectErrors(t, results, map[string]string{"bad": "driver's own: bad"})
		if len(complaints) != 1 || !errors.Is(complaints[0], kubeletplugin.ErrRecoverable) ||
			!strings.Contains(complaints[0].Error(), "outcomes[0].claim.uid: empty") {
			t.Errorf("unexpected calls of OnError: %v", complaints)
		}
	}, handle)
}

func TestUnprepareOfFailedDeviceSucceeds(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.report = func(ctx context.Context, request *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
			if request.GetStep() != pb.Step_STEP_UNPREPARE {
				t.Errorf("unexpected step: %v", request.GetStep())
			}
			return answerReport(ctx, request)
		}
		a.start()
		errs, _ := c.Unprepare(ctx, objects("dead", "bad", "well"), unprepares)
		if errs["dead"] != nil || errs["well"] != nil || errs["bad"].Error() != "[class=transient] bad" || len(errs) != 3 {
			t.Errorf("unexpected errors: %v", errs)
		}
	})
}

func TestUnprepareWithAbsentAgentReturnsDriversErrors(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		began := time.Now()
		errs, _ := c.Unprepare(ctx, objects("dead", "well"), unprepares)
		if errs["dead"].Error() != "driver's own: dead" || errs["well"] != nil || len(errs) != 2 {
			t.Errorf("unexpected errors: %v", errs)
		}
		if took := time.Since(began); took > budget {
			t.Errorf("the call took %v", took)
		}
	})
}

func objects(uids ...string) (all []kubeletplugin.NamespacedObject) {
	for _, uid := range uids {
		name := types.NamespacedName{Namespace: "default", Name: "claim-" + uid}
		all = append(all, kubeletplugin.NamespacedObject{NamespacedName: name, UID: types.UID(uid)})
	}
	return all
}

func unprepares(_ context.Context, claim kubeletplugin.NamespacedObject) error {
	if claim.UID == "well" {
		return nil
	}
	return errors.New("driver's own: " + string(claim.UID))
}

func TestErrorIsOneLineWithinTheKubeletsLimit(t *testing.T) {
	for _, text := range []string{"a\nb\t\x00c  d", "\xff\xfe", "", strings.Repeat("\u00fc", 5000), "x" + strings.Repeat("\U0001F600", 5000)} {
		line := newError(nil, errors.New(text)).Error()
		if line == "" || len(line) > lineMax || !utf8.ValidString(line) || strings.ContainsAny(line, "\n\t\x00") {
			t.Errorf("%.40q becomes %q", text, line)
		}
		if len(text) > lineMax && (len(line) < lineMax-6 || !strings.HasSuffix(line, "...")) {
			t.Errorf("%.40q is cut to %d bytes", text, len(line))
		}
	}
	if line := newError(nil, errors.New("a\nb\t\x00c  d")).Error(); line != "a b c d" {
		t.Error(line)
	}
}

func TestFingerprintChangesWithVersionAndParameters(t *testing.T) {
	opaque := func(driver, parameters string) resourceapi.DeviceAllocationConfiguration {
		return resourceapi.DeviceAllocationConfiguration{
			Source: resourceapi.AllocationConfigSourceClaim,
			DeviceConfiguration: resourceapi.DeviceConfiguration{Opaque: &resourceapi.OpaqueDeviceConfiguration{
				Driver: driver, Parameters: runtime.RawExtension{Raw: []byte(parameters)},
			}},
		}
	}
	with := func(version string, configs ...resourceapi.DeviceAllocationConfiguration) string {
		of := claim("a")
		of.Status.Allocation.Devices.Config = configs
		return claimOf(of, driverName, version).GetFingerprint()
	}
	plain := with("v1")
	if len(plain) != 64 || plain != with("v1") || plain != with("v1", opaque("other.example.com", `{}`)) {
		t.Error("the fingerprint depends on parameters of another driver")
	}
	others := []string{with("v2"), with("v1", opaque(driverName, `{"a":1}`)), with("v1", opaque(driverName, `{"a":2}`))}
	if slices.Contains(others, plain) || others[1] == others[2] {
		t.Errorf("the fingerprint did not change: %s, %v", plain, others)
	}
}

func TestClaimOfHasOnlyTheDriversDevices(t *testing.T) {
	shared := claim("a")
	id := types.UID("share")
	shared.Status.Allocation.Devices.Results[0].ShareID = &id
	devices := claimOf(shared, driverName, "").GetDevices()
	if len(devices) != 1 || devices[0].GetDevice() != "dev-a" || devices[0].GetShareId() != "share" || devices[0].GetRequest() != "r" {
		t.Errorf("unexpected devices: %v", devices)
	}
	if devices[0].GetAdminAccess() {
		t.Error("admin access that the claim has not")
	}
	shared.Status.Allocation.Devices.Results[0].AdminAccess = new(true)
	if !claimOf(shared, driverName, "").GetDevices()[0].GetAdminAccess() {
		t.Error("no admin access")
	}
	if of := claimOf(&resourceapi.ResourceClaim{}, driverName, ""); of.GetDevices() != nil {
		t.Errorf("unexpected result: %v", of)
	}
}

func TestVerdictHasAllFieldsOfTheMessage(t *testing.T) {
	got := verdictOf(&pb.PrepareVerdict{
		ErrorClass: pb.ErrorClass_ERROR_CLASS_FAILED_DEVICE, Code: "gpu.xid.79", Text: "text", Summary: "summary", Advice: "advice",
		Evidence: []string{"first", "second"}, Confidence: 1, RetryAfterS: 1.5, Count: 3, FirstS: 1_790_000_000,
		Devices: []*pb.BlamedDevice{{Driver: driverName, Pool: "node-1", Device: "gpu-3"}}, Repair: pb.DeviceRepair_DEVICE_REPAIR_RESET_DEVICE,
	})
	want := &Verdict{
		Class: ClassFailedDevice, Code: "gpu.xid.79", Text: "text", Summary: "summary", Advice: "advice",
		Evidence: []string{"first", "second"}, Confidence: 1, RetryAfter: 1500 * time.Millisecond, Count: 3, First: time.Unix(1_790_000_000, 0),
		Devices: []DeviceRef{{driverName, "node-1", "gpu-3"}}, Repair: RepairResetDevice,
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("the result is %v, not %v", got, want)
	}
}

func TestEveryClassAndRepairOfTheMessagesHasAName(t *testing.T) {
	classes, repairs := map[Class]bool{}, map[Repair]bool{}
	for number, name := range pb.ErrorClass_name {
		class := classOf(pb.ErrorClass(number))
		classes[class] = true
		if want := strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(name, "ERROR_CLASS_")), "_", "-"); want != string(class) {
			t.Errorf("class %s has the text %s", name, class)
		}
	}
	for number, name := range pb.DeviceRepair_name {
		repair := repairOf(pb.DeviceRepair(number))
		repairs[repair] = true
		if want := strings.ReplaceAll(strings.ToLower(strings.TrimPrefix(name, "DEVICE_REPAIR_")), "_", "-"); want != string(repair) {
			t.Errorf("repair %s has the text %s", name, repair)
		}
	}
	if classOf(99) != ClassUnknown || repairOf(99) != RepairNone {
		t.Error("values of a later version")
	}
}

func TestDevicesThatShareTheirFirstCDIIDAreLogged(t *testing.T) {
	for _, test := range []struct {
		devices []kubeletplugin.Device
		want    int
	}{
		{[]kubeletplugin.Device{{DeviceName: "a", CDIDeviceIDs: []string{"x/gpu=1"}}, {DeviceName: "b", CDIDeviceIDs: []string{"x/gpu=1"}}}, 1},
		{[]kubeletplugin.Device{{DeviceName: "a", CDIDeviceIDs: []string{"x/gpu=1"}}, {DeviceName: "b", CDIDeviceIDs: []string{"x/gpu=2", "x/gpu=1"}}}, 0},
		{[]kubeletplugin.Device{{DeviceName: "a"}, {DeviceName: "b"}}, 0},
	} {
		withFakeClock(t, func(ctx context.Context, t *testing.T, _ *fakeAgent, c *Client) {
			var logged strings.Builder
			ctx = klog.NewContext(ctx, funcr.New(func(_, line string) { logged.WriteString(line) }, funcr.Options{}))
			_, _ = c.Prepare(ctx, claims("it"), func(context.Context, *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
				return test.devices, nil
			})
			if got := strings.Count(logged.String(), "same first CDI id"); got != test.want {
				t.Errorf("devices %v: unexpected log: %s", test.devices, logged.String())
			}
		})
	}
}

func TestLastResultOfAClaimIsReportedOnce(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check = noBlockers
		reported := a.recordReport()
		a.start()
		call := c.StartPrepare(ctx, claims("retried", "bad"))
		call.Fail(claim("retried"), errors.New("driver's own"))
		call.Fail(claim("bad"), errors.New("driver's own"))
		call.Done(claim("retried"))
		call.Fail(claim("unannounced"), errors.New("driver's own"))
		if errs := call.Report(); len(errs) != 2 || errs["unannounced"].Error() != "[class=transient] unannounced" {
			t.Errorf("%v", errs)
		}
		var got []string
		for _, outcome := range reported().GetOutcomes() {
			got = append(got, fmt.Sprintf("%s %t", outcome.GetClaim().GetUid(), outcome.GetFailed()))
		}
		if want := []string{"bad true", "retried false", "unannounced true"}; !slices.Equal(got, want) {
			t.Errorf("reported %q, not %q", got, want)
		}
	})
}

func TestEvidenceOfTheErrorItselfIsReportedDespiteManyMore(t *testing.T) {
	many := make([]error, 12)
	for number := range many {
		many[number] = fmt.Errorf("attempt %d: %w", number, syscall.EAGAIN)
	}
	broken := FailedDevice("gpu-3", "gpu.link", "link is down")
	for _, test := range []struct {
		name       string
		err        error
		more       []error
		wantErrnos int // of both
	}{
		{"many more errors", broken, many, 7},
		{"many errors in the error", errors.Join(append([]error{broken}, many...)...), many[:2], 2 + 10},
		{"many errors in both", errors.Join(append([]error{broken}, many...)...), many, 4 + 6},
		{"few errors", broken, many[:2], 2},
	} {
		t.Run(test.name, func(t *testing.T) {
			withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
				a.check = noBlockers
				reported := a.recordReport()
				a.start()
				call := c.StartPrepare(ctx, claims("bad"))
				call.Fail(claim("bad"), test.err, test.more...)
				call.Report()
				evidence := reported().GetOutcomes()[0].GetEvidence()
				errnos, ofDriver := 0, 0
				for _, piece := range evidence {
					if piece.GetErrno() != nil {
						errnos++
					}
					if piece.GetDriverError().GetCode() == "gpu.link" {
						ofDriver++
					}
				}
				if last := evidence[len(evidence)-1].GetText(); len(evidence) > evidenceCount || ofDriver != 1 ||
					errnos != test.wantErrnos || last != test.err.Error() {
					t.Errorf("%d pieces, %d of an errno, %d of the driver, the last is %q", len(evidence), errnos, ofDriver, last)
				}
			})
		})
	}
}

func TestClaimsPreparedInParallelAreReportedTogether(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check = noBlockers
		reported := a.recordReport()
		a.start()
		call := c.StartPrepare(ctx, claims("bad", "well"))
		var running sync.WaitGroup
		running.Go(func() { call.Fail(claim("bad"), errors.New("driver's own"), syscall.EIO) })
		running.Go(func() { call.Done(claim("well")) })
		running.Wait()
		if errs := call.Report(); len(errs) != 1 || errs["bad"].Error() != "[class=transient] bad" {
			t.Errorf("unexpected errors: %v", errs)
		}
		for _, outcome := range reported().GetOutcomes() {
			if outcome.GetFailed() && outcome.GetEvidence()[0].GetErrno().GetNumber() != int64(syscall.EIO) {
				t.Errorf("unexpected outcome: %v", outcome)
			}
		}
	})
}
