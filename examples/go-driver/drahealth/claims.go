package drahealth

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	pb "drahealth.example.com/go-driver/drahealthv1"
)

// budget is for how long one call of the kubelet waits for the agent, all in all.
const budget = 500 * time.Millisecond

// Prepare is the body of the driver's PrepareResourceClaims. It calls prepare for each claim, one
// after the other, of which nothing is known that would make it futile; of the others the remembered
// error is told again. What prepare returns as an error is told in the agent's words, or in its own
// if the agent does not answer. The error is always nil.
func (c *Client) Prepare(
	ctx context.Context,
	claims []*resourceapi.ResourceClaim,
	prepare func(context.Context, *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error),
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	call := c.Begin(ctx, claims)
	results := make(map[types.UID]kubeletplugin.PrepareResult, len(claims))
	for _, claim := range claims {
		if err := call.Check(claim); err != nil {
			results[claim.UID] = kubeletplugin.PrepareResult{Err: err}
			continue
		}
		devices, err := prepare(ctx, claim)
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
		if err != nil {
			call.Fail(claim, err)
		} else {
			call.Done(claim)
		}
	}
	for uid, err := range call.Finish() {
		results[uid] = kubeletplugin.PrepareResult{Err: err}
	}
	return results, nil
}

// Unprepare is the body of the driver's UnprepareResourceClaims. One that failed because a device is
// dead succeeds all the same, if the agent says so: nothing is left to be undone, and the pod would
// never end. The error is always nil.
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
			Evidence: Evidence(err),
		})
	}
	answers := c.report(ctx, pb.Step_STEP_UNPREPARE, outcomes, budget)
	for uid, err := range results {
		answer, answered := answers[string(uid)]
		switch {
		case err == nil:
		case answered && answer.GetVerdict() == nil:
			results[uid] = nil
		default:
			results[uid] = inWords(answer.GetVerdict(), err)
		}
	}
	return results, nil
}

// Error is why a claim is not prepared, or not unprepared.
type Error struct {
	Verdict *pb.PrepareVerdict // the agent's; nil: it did not answer
	Err     error              // the driver's own; nil: the claim was not tried
	text    string
}

// Error is what the kubelet is to be told: one line of at most 1,024 bytes.
func (e *Error) Error() string { return e.text }

func (e *Error) Unwrap() error { return e.Err }

// inWords is an error in the agent's words, or else in the driver's.
func inWords(verdict *pb.PrepareVerdict, err error) error {
	text := verdict.GetText()
	if text == "" && err != nil {
		text = err.Error()
	}
	return &Error{verdict, err, cutBytes(cmp.Or(oneLine(text), verdict.GetCode(), "no reason given"), lineMax)}
}

// Call is one call of PrepareResourceClaims, for a driver to which Prepare is too simple: one that
// prepares claims at once, for instance. For each claim there is a Check, then Done or Fail; after
// all of them one Finish.
type Call struct {
	client *Client
	ctx    context.Context
	left   time.Duration // of the budget
	claims map[types.UID]*pb.PrepareClaim
	known  map[string]*pb.ClaimAnswer

	mu       sync.Mutex
	failed   map[types.UID]error
	outcomes []*pb.PrepareOutcome
}

// Begin asks what is known against preparing the claims. It waits for 500 ms at most, and not at all
// for an agent that is known to be away. What Finish waits is taken from the same 500 ms.
func (c *Client) Begin(ctx context.Context, claims []*resourceapi.ResourceClaim) *Call {
	call := &Call{
		client: c,
		ctx:    ctx,
		left:   budget,
		claims: make(map[types.UID]*pb.PrepareClaim, len(claims)),
		failed: map[types.UID]error{},
	}
	request := &pb.CheckClaimsRequest{}
	for _, claim := range claims {
		call.claims[claim.UID] = ClaimOf(claim, c.driver, c.version)
		request.Claims = append(request.Claims, call.claims[claim.UID])
	}
	if len(claims) == 0 || c.absent() {
		return call
	}
	began := time.Now()
	asked, cancel := context.WithTimeout(ctx, budget)
	defer cancel()
	reply, err := c.link.CheckClaims(asked, request)
	switch {
	case err == nil:
		c.doubt(0)
		call.known = byUID(reply.GetAnswers())
	case status.Code(err) == codes.Unavailable:
		c.doubt(reconnectMax) // the connection itself says so a moment later only
	case status.Code(err) == codes.DeadlineExceeded && ctx.Err() == nil:
		c.doubt(doubtTime)
	}
	call.left -= time.Since(began)
	return call
}

// Check returns the remembered error of a claim that it is no use to try, or else nil.
func (call *Call) Check(claim *resourceapi.ResourceClaim) error {
	if verdict := call.known[string(claim.UID)].GetVerdict(); verdict != nil {
		return inWords(verdict, nil)
	}
	return nil
}

// Done says that a claim was prepared.
func (call *Call) Done(claim *resourceapi.ResourceClaim) {
	call.ended(claim, &pb.PrepareOutcome{}, nil)
}

// Fail says that a claim was not, and why. Evidence that the error does not show by itself may be
// added.
func (call *Call) Fail(claim *resourceapi.ResourceClaim, err error, more ...*pb.Evidence) {
	evidence := append(more[:len(more):len(more)], Evidence(err)...)
	evidence = evidence[:min(len(evidence), evidenceCount)]
	call.ended(claim, &pb.PrepareOutcome{Failed: true, Evidence: evidence}, err)
}

func (call *Call) ended(claim *resourceapi.ResourceClaim, outcome *pb.PrepareOutcome, err error) {
	call.mu.Lock()
	defer call.mu.Unlock()
	outcome.Claim = call.claims[claim.UID]
	call.outcomes = append(call.outcomes, outcome)
	if outcome.Failed {
		call.failed[claim.UID] = err
	}
}

// Finish tells the agent how it went, and returns what the kubelet is to be told of each claim that
// failed. When it returns in time, a device that is shown to be broken is Unhealthy already. The
// agent hears of it in any case; if all went well, or it is known to be away, it is not waited for.
func (call *Call) Finish() map[types.UID]error {
	call.mu.Lock()
	defer call.mu.Unlock()
	answers := call.client.report(call.ctx, pb.Step_STEP_PREPARE, call.outcomes, call.left)
	errs := make(map[types.UID]error, len(call.failed))
	for uid, err := range call.failed {
		errs[uid] = inWords(answers[string(uid)].GetVerdict(), err)
	}
	return errs
}

// ClaimOf is a claim as far as it is the driver's. Its fingerprint is of all that the outcome depends
// on besides the devices: the driver's version and the opaque parameters that are meant for it.
func ClaimOf(claim *resourceapi.ResourceClaim, driver, version string) *pb.PrepareClaim {
	of := &pb.PrepareClaim{Namespace: claim.Namespace, Name: claim.Name, Uid: string(claim.UID)}
	if claim.Status.Allocation == nil {
		return of
	}
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver == driver {
			device := &pb.ClaimedDevice{Request: result.Request, Pool: result.Pool, Device: result.Device}
			if result.ShareID != nil {
				device.ShareId = string(*result.ShareID)
			}
			of.Devices = append(of.Devices, device)
		}
	}
	var configs []resourceapi.DeviceAllocationConfiguration
	for _, config := range claim.Status.Allocation.Devices.Config {
		if config.Opaque != nil && config.Opaque.Driver == driver {
			configs = append(configs, config)
		}
	}
	// parameters that are no JSON cannot come from an API server; without a fingerprint nothing is
	// forgotten early
	if facts, err := json.Marshal([]any{version, configs}); err == nil {
		sum := sha256.Sum256(facts)
		of.Fingerprint = hex.EncodeToString(sum[:])
	}
	return of
}

func byUID(answers []*pb.ClaimAnswer) map[string]*pb.ClaimAnswer {
	found := make(map[string]*pb.ClaimAnswer, len(answers))
	for _, answer := range answers {
		found[answer.GetUid()] = answer
	}
	return found
}
