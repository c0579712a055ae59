// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"reflect"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"

	pb "drahealth.example.com/go/drahealthv1"
)

const (
	// everyMin and everyMax limit the period of a check.
	everyMin = 100 * time.Millisecond
	everyMax = time.Hour
	// countMax limits RaiseAfter and ClearAfter.
	countMax = 1000
	// checksMax limits the checks of a driver: the agent has this limit for each device.
	checksMax = 8
	// runsMax limits the checks that run at once; a hung one frees its slot at its timeout.
	runsMax = 16
	// batchMax limits the results of one request, which is below the agent's 512 KiB with the longest texts.
	batchMax = 32
	// reportChecksTimeout limits a call with results.
	reportChecksTimeout = 5 * time.Second
	// leaseMin is the shortest lease of a result.
	leaseMin = 3 * time.Second
	// noAnswerInTime is the reason of a run that did not end within the check's timeout.
	noAnswerInTime = "no answer within the check's timeout"
	// noChecks is the message of a device with checks that an agent without ReportChecks takes for Healthy.
	noChecks = "drahealth agent does not know the driver's own checks: update the agent"
)

// Severity is the effect of a Finding on its device.
type Severity int

const (
	// SeverityUnknown: the health cannot be determined.
	SeverityUnknown Severity = iota
	// SeverityDegraded: the device works worse than it should; Healthy, with a message.
	SeverityDegraded
	// SeverityUnhealthy: the device cannot be used.
	SeverityUnhealthy
)

// Finding is a fault that a check found.
type Finding struct {
	// Code is a stable dotted code of the driver, "fpga.bank_locked".
	Code     string
	Severity Severity
	// Evidence is one line with the compared numbers, but without times, addresses or counters: each change
	// of the text is reported to the kubelet. The agent cuts it to 500 bytes.
	Evidence string
	// Advice is what the operator should do; may be empty.
	Advice string
	// Repair is the repair that ends the fault, for programs that act on reports.
	Repair Repair
}

// Unhealthy returns the finding of a device that cannot be used; the format is that of fmt.Sprintf.
func Unhealthy(code, format string, args ...any) *Finding {
	return &Finding{Code: code, Severity: SeverityUnhealthy, Evidence: fmt.Sprintf(format, args...)}
}

// Degraded returns the finding of a device that works worse than it should: it stays Healthy, with a message.
func Degraded(code, format string, args ...any) *Finding {
	return &Finding{Code: code, Severity: SeverityDegraded, Evidence: fmt.Sprintf(format, args...)}
}

// Unknown returns the finding of a device whose health cannot be determined.
func Unknown(code, format string, args ...any) *Finding {
	return &Finding{Code: code, Severity: SeverityUnknown, Evidence: fmt.Sprintf(format, args...)}
}

// HealthCheck is a check of the driver's own, which the client runs periodically on each device.
type HealthCheck struct {
	// Name is a DNS label.
	Name string
	// Every is the time between two runs, 100 ms to an hour.
	Every time.Duration
	// Timeout is the longest duration of a run; 0: Every. The context of Run ends then. A run that ignores
	// that has no result, and no other run on a device of this name begins until it has returned.
	Timeout time.Duration
	// Devices returns whether a device is checked; nil: all declared devices are. Check and Declare call it.
	Devices func(Device) bool
	// RaiseAfter is the number of consecutive runs with a fault that raise it, ClearAfter that of runs
	// without it that clear it; 0: 3.
	RaiseAfter, ClearAfter int
	// Run checks a device. It returns nil, nil for no fault. After an error the run has no result: after
	// RaiseAfter such runs the device is Unknown, and a fault that was raised before stays. Runs of
	// several devices may be concurrent. A panic is an error, too; the first one is logged with its stack.
	Run func(context.Context, Device) (*Finding, error)
}

// Check runs a check on the devices of Declare, present and later ones, until the client is closed, and
// reports the results to the agent. It is called before Declare, so that no device is reported before its first
// result. The first run is at once. When the agent accepts a Part that is new to the client, the check runs again,
// because for the agent earlier results may be about other hardware.
//
// A result has a lease of three periods and the timeout. If the driver, or the check, stops, its devices
// become Unknown when the lease ends. They are also Unknown until the agent has a result, and if the agent is
// too old for checks; OnError gets an error then.
func (c *Client) Check(check HealthCheck) error {
	check.Timeout = cmp.Or(check.Timeout, check.Every)
	if err := c.checks.add(check); err != nil {
		return fmt.Errorf("drahealth: check %q: %w", check.Name, err)
	}
	c.checks.start.Do(func() { c.inBackground(c.sendResults) })
	c.redeclare(nil)
	return nil
}

// Recheck runs a check now on all its devices, for example after a reset; an empty name stands for all checks. The
// next period begins with this run. Recheck returns at once, and an error if there is no such check.
func (c *Client) Recheck(name string) error {
	k := c.checks
	k.mu.Lock()
	defer k.mu.Unlock()
	if name != "" && !slices.ContainsFunc(k.all, func(check HealthCheck) bool { return check.Name == name }) {
		return fmt.Errorf("drahealth: check %q does not exist", name)
	}
	for key, run := range k.runs {
		if name == "" || name == key.check {
			fill(run.now)
		}
	}
	return nil
}

// checkKey identifies a check of a device.
type checkKey struct {
	check string
	device
}

// result is the newest result of a check of a device.
type result struct {
	outcome
	check  *HealthCheck
	number int64 // of the run
	ended  time.Time
}

// checks has the driver's checks and their newest results.
type checks struct {
	start  sync.Once
	wake   chan struct{} // capacity 1; full: results are to be sent
	slots  chan struct{} // capacity runsMax; one entry for each run
	mu     sync.Mutex
	all    []HealthCheck
	given  []Device // the devices of Declare; nil: not called
	number int64    // of changes of all and given
	runs   map[checkKey]*checkRun
	newest map[checkKey]result
	unsent map[checkKey]bool
	ran    map[checkKey]int64           // number of the last run, also of devices that are no longer declared
	known  map[device]Part              // the part that the agent accepted last, also of these
	ended  map[checkKey]<-chan struct{} // closed when the last run has returned, also of these
	absent bool                         // the agent does not have ReportChecks
	failed bool                         // OnError got the agent's refusal of a result
}

// checkRun is a check of a device that runs periodically.
type checkRun struct {
	check    HealthCheck
	device   Device
	cancel   context.CancelFunc
	now      chan struct{} // capacity 1; full: a run is due now
	awaited  *declaration  // the agent may have other hardware for the device until it accepts this; nil: none
	running  bool          // a run is in progress, whose result is not set yet
	panicked bool          // a panic was logged; only for the goroutine of the current run
}

func newChecks() *checks {
	return &checks{
		wake: make(chan struct{}, 1), slots: make(chan struct{}, runsMax),
		runs: map[checkKey]*checkRun{}, newest: map[checkKey]result{}, unsent: map[checkKey]bool{},
		ran: map[checkKey]int64{}, known: map[device]Part{}, ended: map[checkKey]<-chan struct{}{},
	}
}

// add adds a check, or returns what is wrong with it.
func (k *checks) add(check HealthCheck) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	wrong := validation.IsDNS1123Label(check.Name)
	switch {
	case len(wrong) > 0:
		return errors.New("name: " + wrong[0])
	case check.Every < everyMin || check.Every > everyMax:
		return fmt.Errorf("every %s is not within %s and %s", check.Every, everyMin, everyMax)
	case check.Timeout < 0 || check.Timeout > everyMax:
		return fmt.Errorf("timeout %s is not within 0 and %s", check.Timeout, everyMax)
	case min(check.RaiseAfter, check.ClearAfter) < 0 || max(check.RaiseAfter, check.ClearAfter) > countMax:
		return fmt.Errorf("raise after %d, clear after %d: not within 0 and %d", check.RaiseAfter, check.ClearAfter, countMax)
	case check.Run == nil:
		return errors.New("has no function Run")
	case slices.ContainsFunc(k.all, func(other HealthCheck) bool { return other.Name == check.Name }):
		return errors.New("the name is taken")
	case len(k.all) == checksMax:
		return fmt.Errorf("the driver has %d checks already", checksMax)
	}
	k.all = append(k.all, check)
	k.number++
	return nil
}

// redeclare declares devices with the names of their checks, and starts and ends checks accordingly. Nil
// devices are those of the last call of Declare, if there was one.
func (c *Client) redeclare(devices []Device) {
	k := c.checks
	k.mu.Lock()
	if devices != nil {
		k.given = devices
		k.number++
	}
	given, all, number := k.given, k.all, k.number
	k.mu.Unlock()
	if given == nil {
		return
	}
	wanted := make([][]*HealthCheck, len(given))
	for i, offered := range given { // without k.mu: Devices is the driver's, and may call the client
		for at := range all {
			if check := &all[at]; check.Devices == nil || check.Devices(offered) {
				wanted[i] = append(wanted[i], check)
			}
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.number == number { // else the call that changed it declares the newer devices
		c.declareChecked(given, wanted)
	}
}

// declareChecked declares devices with their wanted checks; the caller holds checks.mu.
func (c *Client) declareChecked(devices []Device, wanted [][]*HealthCheck) {
	k := c.checks
	declared := &declaration{devices: make([]*pb.DeclaredDevice, 0, len(devices)), names: map[device]bool{}}
	kept := map[checkKey]bool{}
	for i, offered := range devices {
		message := messageOf(offered)
		name := device{offered.Pool, offered.Name}
		waits := !reflect.DeepEqual(k.known[name], offered.Part)
		declared.names[name] = true
		for _, check := range wanted[i] {
			key := checkKey{check.Name, name}
			message.Checks = append(message.Checks, check.Name)
			kept[key] = true
			run := k.runs[key]
			if run != nil && !reflect.DeepEqual(run.device.Part, offered.Part) {
				k.end(key) // a result about the former hardware must not count
				run, waits = nil, true
			}
			if run == nil {
				ctx, cancel := context.WithCancel(c.background)
				run = &checkRun{check: *check, cancel: cancel, now: make(chan struct{}, 1)}
				k.runs[key] = run
				c.inBackground(func() { c.runPeriodically(ctx, key, run) })
			}
			run.device, run.awaited = offered, nil
			if waits {
				run.awaited = declared
			}
		}
		declared.devices = append(declared.devices, message)
	}
	for key := range k.runs {
		if !kept[key] {
			k.end(key)
		}
	}
	if earlier := c.declared.Load(); earlier != nil {
		declared.accepted.Store(earlier.accepted.Load())
	}
	c.declared.Store(declared)
	fill(c.undeclared)
	c.declareOnce.Do(func() { c.inBackground(c.keepDeclared) })
}

// end ends the runs of a check of a device, and forgets its result.
func (k *checks) end(key checkKey) {
	k.runs[key].cancel()
	delete(k.runs, key)
	delete(k.newest, key)
	delete(k.unsent, key)
}

// accepted makes a run due now of each check with a result whose device may have other hardware since a declaration
// that the agent has accepted: for the agent, results from before are about the former hardware. So it is with the
// first declaration of a part: the former one can be that of the driver before a restart. The run repeats the former
// one and has its number, so that the agent counts an equal result once. A run in progress is not repeated: it ends after
// the declaration.
func (k *checks) accepted(declared *declaration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for key, run := range k.runs {
		if run.awaited == declared {
			run.awaited, k.known[key.device] = nil, run.device.Part
			if _, ran := k.newest[key]; ran && !run.running { // else the current run ends after the declaration
				k.ran[key]--
				fill(run.now)
			}
		}
	}
}

// runPeriodically runs a check of a device until ctx is done. The length of the first period is random, so
// that the checks of many devices do not run at once.
func (c *Client) runPeriodically(ctx context.Context, key checkKey, run *checkRun) {
	every := run.check.Every
	due := time.Now()
	period := every/2 + rand.N(every/2+1)
	wait := run.check.Timeout // for a run on former hardware; one of this loop that hangs has had its time
	for {
		c.checks.begin(run)
		found := c.runOnce(ctx, key, run, wait)
		wait = min(wait, budget)
		if ctx.Err() != nil {
			return
		}
		c.checks.set(key, run, result{outcome: found, check: &run.check, ended: time.Now()})
		due = due.Add(period)
		period = every
		if late := time.Since(due); late > 0 {
			due = due.Add(late.Truncate(every) + every)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(due)):
		case <-run.now:
			due = time.Now()
		}
	}
}

// outcome is what a run of a check returned.
type outcome struct {
	finding *Finding
	err     error
}

// runOnce runs a check, unless the last run of the check on a device of this name does not return within wait.
// That run may be on former hardware; a result that is too late does not count.
func (c *Client) runOnce(ctx context.Context, key checkKey, run *checkRun, wait time.Duration) outcome {
	if !c.checks.waitEnded(ctx, key, wait) {
		return outcome{err: errors.New(noAnswerInTime)}
	}
	waited := time.NewTimer(run.check.Every)
	defer waited.Stop()
	select {
	case c.checks.slots <- struct{}{}:
		defer func() { <-c.checks.slots }()
	case <-waited.C:
		return outcome{err: fmt.Errorf("not run: %d checks are running", runsMax)}
	case <-ctx.Done():
		return outcome{}
	}
	returned, ended := make(chan outcome, 1), make(chan struct{})
	if !c.checks.started(ctx, key, ended) {
		return outcome{}
	}
	timed, cancel := context.WithTimeout(ctx, run.check.Timeout)
	go func() {
		defer close(ended)
		defer cancel()
		returned <- run.call(timed, c.checks.deviceOf(run))
	}()
	return outcomeOf(ctx, timed, returned)
}

// outcomeOf waits for the outcome of a run until its context timed is done; ctx is that of all runs.
func outcomeOf(ctx, timed context.Context, returned <-chan outcome) outcome {
	late := outcome{err: errors.New(noAnswerInTime)}
	var found outcome
	select {
	case found = <-returned:
	case <-timed.Done():
		select {
		case found = <-returned: // a run that returns ends timed, too
		default:
			if ctx.Err() != nil { // the driver may soon free what the check uses
				select {
				case <-returned:
				case <-time.After(budget):
				}
			}
			return late
		}
	}
	if found.err != nil && timed.Err() == context.DeadlineExceeded {
		found = late // whatever the error says: the text must be the same each time
	}
	return found
}

// call calls the check's Run. A panic becomes an error, because it would end the driver.
func (run *checkRun) call(ctx context.Context, checked Device) (found outcome) {
	defer func() {
		reason := recover()
		if reason == nil {
			return
		}
		found = outcome{err: fmt.Errorf("the check panicked: %v", reason)}
		if !run.panicked {
			run.panicked = true
			klog.FromContext(ctx).Error(found.err, "Check has no result; further panics are not logged",
				"check", run.check.Name, "device", checked.Name, "stack", string(debug.Stack()))
		}
	}()
	finding, err := run.check.Run(ctx, checked)
	if finding != nil {
		finding = new(*finding) // the next run may change the driver's own
	}
	return outcome{finding, err}
}

func (k *checks) deviceOf(run *checkRun) Device {
	k.mu.Lock()
	defer k.mu.Unlock()
	return run.device
}

// waitEnded waits until the last run of a check of a device has returned; it returns false after the timeout, or once ctx
// is done.
func (k *checks) waitEnded(ctx context.Context, key checkKey, timeout time.Duration) bool {
	k.mu.Lock()
	ended := k.ended[key]
	k.mu.Unlock()
	if ended == nil {
		return true
	}
	timed, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	select {
	case <-ended:
	case <-timed.Done():
		select {
		case <-ended: // select takes a random one of several cases
		default:
			return false
		}
	}
	return true
}

// started notes that a run begins, whose return closes ended. It returns false if ctx is done: the check of a device
// that was declared since then may run.
func (k *checks) started(ctx context.Context, key checkKey, ended <-chan struct{}) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	if ctx.Err() != nil {
		return false
	}
	k.ended[key] = ended
	return true
}

// begin notes that a run is in progress until its result is set.
func (k *checks) begin(run *checkRun) {
	k.mu.Lock()
	defer k.mu.Unlock()
	run.running = true
}

// set numbers the newest result and replaces the one before, unless the device is no longer checked.
func (k *checks) set(key checkKey, run *checkRun, newest result) {
	k.mu.Lock()
	defer k.mu.Unlock()
	run.running = false
	if k.runs[key] == run {
		k.ran[key]++
		newest.number = k.ran[key]
		k.newest[key] = newest
		k.unsent[key] = true
		fill(k.wake)
	}
}

// resend sends all newest results again: the agent may be a new one, which has none.
func (k *checks) resend() {
	k.mu.Lock()
	defer k.mu.Unlock()
	for key := range k.newest {
		k.unsent[key] = true
	}
	fill(k.wake)
}

// take returns results that are to be sent, with their ages, and their keys.
func (k *checks) take() (keys []checkKey, results []*pb.CheckResult) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for key := range k.unsent {
		if len(keys) == batchMax {
			break
		}
		delete(k.unsent, key)
		keys = append(keys, key)
		results = append(results, messageOfResult(key, k.newest[key]))
	}
	return keys, results
}

// putBack marks results as unsent.
func (k *checks) putBack(keys []checkKey) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, key := range keys {
		if _, known := k.newest[key]; known {
			k.unsent[key] = true
		}
	}
}

func messageOfResult(key checkKey, newest result) *pb.CheckResult {
	check := newest.check
	message := &pb.CheckResult{
		Check:      key.check,
		Pool:       key.pool,
		Device:     key.name,
		EveryS:     check.Every.Seconds(),
		LeaseS:     max(3*check.Every+check.Timeout, leaseMin).Seconds(),
		AgeS:       time.Since(newest.ended).Seconds(),
		RaiseAfter: int64(check.RaiseAfter),
		ClearAfter: int64(check.ClearAfter),
		Run:        newest.number,
	}
	switch found := newest.finding; {
	case newest.err != nil:
		message.Outcome = &pb.CheckResult_NoResult{NoResult: cutBytes(oneLine(newest.err.Error()), evidenceMax)}
	case found == nil:
		message.Outcome = &pb.CheckResult_NoFault{NoFault: &pb.NoFault{}}
	default:
		message.Outcome = &pb.CheckResult_Finding{Finding: &pb.CheckFinding{
			Code:     evidenceText(found.Code),
			Severity: severityOf(found.Severity),
			Evidence: cutBytes(oneLine(found.Evidence), evidenceMax),
			Advice:   cutBytes(oneLine(found.Advice), evidenceMax),
			Repair:   messageOfRepair(found.Repair),
		}}
	}
	return message
}

func severityOf(severity Severity) pb.CheckSeverity {
	switch severity {
	case SeverityDegraded:
		return pb.CheckSeverity_CHECK_SEVERITY_DEGRADED
	case SeverityUnhealthy:
		return pb.CheckSeverity_CHECK_SEVERITY_UNHEALTHY
	default:
		return pb.CheckSeverity_CHECK_SEVERITY_UNKNOWN
	}
}

// messageOfRepair is the inverse of repairOf.
func messageOfRepair(repair Repair) pb.DeviceRepair {
	for number := range pb.DeviceRepair_name {
		if repairOf(pb.DeviceRepair(number)) == repair {
			return pb.DeviceRepair(number)
		}
	}
	return pb.DeviceRepair_DEVICE_REPAIR_NONE
}

// sendResults sends new results until the client is closed, and again after an error that can pass.
func (c *Client) sendResults() {
	pause := retryMin
	for {
		select {
		case <-c.background.Done():
			return
		case <-c.checks.wake:
		}
		for more := true; more; { // also without results: the answer shows whether the agent knows checks
			keys, results := c.checks.take()
			if err := c.sendBatch(results); err == nil {
				pause, more = retryMin, len(keys) == batchMax
				continue
			}
			c.checks.putBack(keys)
			if !sleep(c.background, pause) {
				return
			}
			pause = min(2*pause, retryMax)
		}
	}
}

// sendBatch sends results. It returns an error if a repetition can help.
func (c *Client) sendBatch(results []*pb.CheckResult) error {
	ctx, cancel := context.WithTimeout(c.background, reportChecksTimeout)
	defer cancel()
	_, err := c.link.ReportChecks(ctx, &pb.ReportChecksRequest{Results: results})
	switch code := status.Code(err); code {
	case codes.OK:
		c.checks.answered(false)
		return nil
	case codes.Unimplemented:
		if c.checks.answered(true) {
			c.complain(ctx, err, noChecks)
			c.disconnect() // the agent sends all devices again
		}
		return nil
	case codes.InvalidArgument:
		return c.sendEach(ctx, results, err)
	default:
		return err
	}
}

// sendEach sends results one at a time, because the agent refuses a request with a result that is not valid.
// A refused result becomes one without a result, with the agent's text, so that its device is Unknown.
func (c *Client) sendEach(ctx context.Context, results []*pb.CheckResult, refusal error) error {
	if len(results) > 1 {
		for _, result := range results {
			if err := c.sendBatch([]*pb.CheckResult{result}); err != nil {
				return err
			}
		}
		return nil
	}
	if c.checks.refused() {
		c.complain(ctx, refusal, "the drahealth agent refused the result of a check")
	}
	result := results[0]
	if _, again := result.GetOutcome().(*pb.CheckResult_NoResult); again {
		return nil
	}
	text := "result refused: " + status.Convert(refusal).Message()
	result.Outcome = &pb.CheckResult_NoResult{NoResult: cutBytes(oneLine(text), evidenceMax)}
	return c.sendBatch(results)
}

// unknown returns the devices with checks that the agent does not know.
func (k *checks) unknown() map[device]bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	devices := map[device]bool{}
	if k.absent {
		for key := range k.runs {
			devices[key.device] = true
		}
	}
	return devices
}

// answered notes whether the agent has ReportChecks; it returns true if it was not known that it has not.
func (k *checks) answered(absent bool) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	is := absent && !k.absent
	k.absent = absent
	return is
}

// refused notes a refused result; it returns true for the first one.
func (k *checks) refused() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	first := !k.failed
	k.failed = true
	return first
}
