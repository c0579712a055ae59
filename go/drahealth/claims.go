// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"maps"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	pb "drahealth.example.com/go/drahealthv1"
)

// budget limits how long one call of the kubelet waits for the agent in total.
const budget = 500 * time.Millisecond

// Prepare is the body of the driver's PrepareResourceClaims. It calls prepare for each claim, one after
// another, except for claims with a known blocker, for which it returns the remembered error. Claims that
// accept tainted devices or have admin access to all their devices are always tried. An error of prepare
// gets the agent's text, or keeps its own if the agent does not answer. The returned error is always nil.
func (c *Client) Prepare(
	ctx context.Context,
	claims []*resourceapi.ResourceClaim,
	prepare func(context.Context, *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error),
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	call := c.StartPrepare(ctx, claims)
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		if err := call.Check(claim); err != nil {
			results[claim.UID] = kubeletplugin.PrepareResult{Err: err}
			continue
		}
		devices, err := prepare(ctx, claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
		warnSharedIDs(ctx, claim, devices)
		if err != nil {
			call.Fail(claim, err)
		} else {
			call.Done(claim)
		}
	}
	for uid, err := range call.Report() {
		results[uid] = kubeletplugin.PrepareResult{Err: err}
	}
	return results, nil
}

// Unprepare is the body of the driver's UnprepareResourceClaims. If it failed because of a failed
// device, the agent can turn it into a success: there is nothing left to undo, and the pod could not
// terminate otherwise. The returned error is always nil.
func (c *Client) Unprepare(
	ctx context.Context,
	claims []kubeletplugin.NamespacedObject,
	unprepare func(context.Context, kubeletplugin.NamespacedObject) error,
) (map[types.UID]error, error) {
	results := make(map[types.UID]error, len(claims))
	var outcomes []*pb.PrepareOutcome
	for _, claim := range claims {
		err := unprepare(ctx, claim)
		results[claim.UID] = err
		outcomes = append(outcomes, &pb.PrepareOutcome{
			Claim:    &pb.PrepareClaim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)},
			Failed:   err != nil,
			Evidence: evidenceOf(err),
		})
	}
	answers := c.report(ctx, pb.Step_STEP_UNPREPARE, outcomes, nil, budget)
	for uid, err := range results {
		answer, answered := answers[string(uid)]
		switch {
		case err == nil:
		case answered && answer.GetVerdict() == nil:
			results[uid] = nil
		default:
			results[uid] = newError(answer.GetVerdict(), err)
		}
	}
	return results, nil
}

// warnSharedIDs logs devices of a claim that share their first CDI id: the pod's status shows one of them.
func warnSharedIDs(ctx context.Context, claim *resourceapi.ResourceClaim, devices []kubeletplugin.Device) {
	names := map[string]string{}
	for _, device := range devices {
		if len(device.CDIDeviceIDs) == 0 {
			continue
		}
		id := device.CDIDeviceIDs[0]
		if other, shared := names[id]; shared && other != device.DeviceName {
			klog.FromContext(ctx).Info("Devices have the same first CDI id; the pod's status shows the health of one of them",
				"claim", klog.KObj(claim), "devices", []string{other, device.DeviceName}, "id", id)
		}
		names[id] = device.DeviceName
	}
}

// Error is why a claim is not prepared, or not unprepared.
type Error struct {
	Verdict *Verdict // the agent's; nil: it did not answer
	Err     error    // the driver's own; nil: the claim was not tried
	text    string
}

// Error returns the text for the kubelet: one line of at most 1,024 bytes.
func (e *Error) Error() string { return e.text }

// Unwrap returns the driver's own error.
func (e *Error) Unwrap() error { return e.Err }

// Repair returns the repair that the agent expects to end the fault, for example of the device to reset.
// RepairNone: no repair is needed or known, or the agent did not answer.
func (e *Error) Repair() Repair {
	if e.Verdict == nil {
		return RepairNone
	}
	return e.Verdict.Repair
}

// newError returns an error with the agent's text, or else the driver's.
func newError(verdict *pb.PrepareVerdict, err error) error {
	text := verdict.GetText()
	if text == "" && err != nil {
		text = err.Error()
	}
	return &Error{verdictOf(verdict), err, cutBytes(cmp.Or(oneLine(text), verdict.GetCode(), "no reason given"), lineMax)}
}

// Call is one call of PrepareResourceClaims, for drivers that cannot use Prepare, for example because
// they prepare claims in parallel. Use Check for each claim, then Done or Fail unless Check returns an error, and
// one Report at the end, whose errors replace those of Check. All methods are safe for concurrent use.
type Call struct {
	client *Client
	ctx    context.Context
	left   time.Duration // rest of the budget
	claims map[types.UID]*pb.PrepareClaim
	known  map[string]*pb.ClaimAnswer

	mu       sync.Mutex
	failed   map[types.UID]error
	blocked  map[types.UID]error // errors that Check has returned
	outcomes []*pb.PrepareOutcome
}

// StartPrepare requests the known blockers of the claims from the agent, except of claims that accept tainted
// devices or have admin access to all their devices. StartPrepare and Report together
// block for at most 500 ms, and not at all while the agent is known to be absent. Report waits longer only
// for the taint of a device that failed, see TaintWait.
func (c *Client) StartPrepare(ctx context.Context, claims []*resourceapi.ResourceClaim) *Call {
	call := &Call{
		client:  c,
		ctx:     ctx,
		left:    budget,
		claims:  make(map[types.UID]*pb.PrepareClaim, len(claims)),
		failed:  map[types.UID]error{},
		blocked: map[types.UID]error{},
	}
	request := &pb.CheckClaimsRequest{}
	for _, claim := range claims {
		call.claims[claim.UID] = claimOf(claim, c.driver, c.version)
		if !acceptsFaults(claim, c.driver) {
			request.Claims = append(request.Claims, call.claims[claim.UID])
		}
	}
	if len(request.Claims) == 0 || c.absent() {
		return call
	}
	began := time.Now()
	timed, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	reply, err := c.link.CheckClaims(timed, request)
	c.noteAnswer(ctx, err)
	call.known = byUID(reply.GetAnswers())
	call.left -= time.Since(began)
	return call
}

// Check returns the remembered error of a claim with a known blocker, or nil. The driver does not try a claim with
// an error.
func (call *Call) Check(claim *resourceapi.ResourceClaim) error {
	verdict := call.known[string(claim.UID)].GetVerdict()
	if verdict == nil {
		return nil
	}
	err := newError(verdict, nil)
	call.mu.Lock()
	defer call.mu.Unlock()
	// a claim that was tried although it is blocked has the result of Done or Fail
	if !slices.ContainsFunc(call.outcomes, isOf(claim)) {
		call.blocked[claim.UID] = err
	}
	return err
}

// isOf returns a function that reports whether a result is that of the claim.
func isOf(claim *resourceapi.ResourceClaim) func(*pb.PrepareOutcome) bool {
	return func(outcome *pb.PrepareOutcome) bool { return outcome.GetClaim().GetUid() == string(claim.UID) }
}

// Done records that a claim was prepared. Of several calls of Done and Fail for a claim the last one counts.
func (call *Call) Done(claim *resourceapi.ResourceClaim) {
	call.ended(claim, &pb.PrepareOutcome{}, nil)
}

// Fail records that a claim was not prepared. more are errors with evidence that err does not wrap. Of more than 16
// pieces of evidence err and more have half each, if both have so many.
func (call *Call) Fail(claim *resourceapi.ResourceClaim, err error, more ...error) {
	own := evidenceOf(err)
	var evidence []*pb.Evidence
	for _, further := range more {
		evidence = append(evidence, evidenceOf(further)...)
	}
	evidence = evidence[:min(len(evidence), evidenceCount-min(len(own), evidenceCount/2))]
	evidence = append(evidence, cutEvidence(own, evidenceCount-len(evidence))...)
	call.ended(claim, &pb.PrepareOutcome{Failed: true, Evidence: evidence}, err)
}

func (call *Call) ended(claim *resourceapi.ResourceClaim, outcome *pb.PrepareOutcome, err error) {
	call.mu.Lock()
	defer call.mu.Unlock()
	outcome.Claim = call.claims[claim.UID]
	if outcome.Claim == nil { // not one of StartPrepare
		outcome.Claim = claimOf(claim, call.client.driver, call.client.version)
	}
	// the agent refuses a report with two results of a claim
	call.outcomes = slices.DeleteFunc(call.outcomes, isOf(claim))
	call.outcomes = append(call.outcomes, outcome)
	delete(call.failed, claim.UID)
	delete(call.blocked, claim.UID)
	if outcome.Failed {
		call.failed[claim.UID] = err
	}
}

// Report sends the results to the agent and returns an error for each claim that failed, and for each for which
// Check has returned an error: the text of each names all. If the agent answers in time, a device that failed is
// already Unhealthy, and Report waits until the function of WatchTaints has published its taint (see TaintWait).
// The report is sent in any case; Report waits for the answer only if a claim failed and the agent is not known to
// be absent.
func (call *Call) Report() map[types.UID]error {
	call.mu.Lock()
	defer call.mu.Unlock()
	var blocked []string
	for uid := range call.blocked {
		blocked = append(blocked, string(uid))
	}
	answers := call.client.report(call.ctx, pb.Step_STEP_PREPARE, call.outcomes, blocked, call.left)
	errs := maps.Clone(call.blocked)
	for uid := range errs {
		if verdict := answers[string(uid)].GetVerdict(); verdict != nil {
			errs[uid] = newError(verdict, nil)
		}
	}
	var verdicts []*pb.PrepareVerdict
	for uid, err := range call.failed {
		verdicts = append(verdicts, answers[string(uid)].GetVerdict())
		errs[uid] = newError(answers[string(uid)].GetVerdict(), err)
	}
	for _, blocked := range call.known {
		verdicts = append(verdicts, blocked.GetVerdict())
	}
	call.client.waitTainted(call.ctx, verdicts)
	return errs
}

// claimOf returns the driver's part of a claim. Its fingerprint covers what the result depends on apart
// from the devices: the driver's version and its opaque parameters.
func claimOf(claim *resourceapi.ResourceClaim, driver, version string) *pb.PrepareClaim {
	prepared := &pb.PrepareClaim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}
	if claim.Status.Allocation == nil {
		return prepared
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == driver {
			device := &pb.ClaimedDevice{
				Request: result.Request, Pool: result.Pool, Device: result.Device, AdminAccess: hasAdminAccess(result),
			}
			if result.ShareID != nil {
				device.ShareId = string(*result.ShareID)
			}
			prepared.Devices = append(prepared.Devices, device)
		}
	}
	var configs []resourceapi.DeviceAllocationConfiguration
	for _, config := range claim.Status.Allocation.Devices.Config {
		if config.Opaque != nil && config.Opaque.Driver == driver {
			configs = append(configs, config)
		}
	}
	// the API server stores only valid JSON; without a fingerprint a remembered failure just expires
	// later
	if facts, err := json.Marshal([]any{version, configs}); err == nil {
		sum := sha256.Sum256(facts)
		prepared.Fingerprint = hex.EncodeToString(sum[:])
	}
	return prepared
}

// acceptsFaults reports whether a claim is tried whatever the health of its devices: each of the driver's devices
// has admin access, or a toleration of any taint that keeps pods off. The key of the toleration does not count.
func acceptsFaults(claim *resourceapi.ResourceClaim, driver string) bool {
	accepted := false
	if claim.Status.Allocation == nil {
		return false
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != driver {
			continue
		}
		accepted = hasAdminAccess(result) ||
			slices.ContainsFunc(result.Tolerations, func(toleration resourceapi.DeviceToleration) bool {
				return toleration.Effect != "None" // empty: all effects
			})
		if !accepted {
			return false
		}
	}
	return accepted
}

func hasAdminAccess(result resourceapi.DeviceRequestAllocationResult) bool {
	return result.AdminAccess != nil && *result.AdminAccess
}

func byUID(answers []*pb.ClaimAnswer) map[string]*pb.ClaimAnswer {
	found := make(map[string]*pb.ClaimAnswer, len(answers))
	for _, answer := range answers {
		found[answer.GetUid()] = answer
	}
	return found
}
