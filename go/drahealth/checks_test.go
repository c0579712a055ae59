// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"

	pb "drahealth.example.com/go/drahealthv1"
)

// card is a device that only the driver's checks evaluate.
func card(name string) Device { return Device{Name: name, Pool: "node-1"} }

// reported records the results that the agent receives.
type reported struct{ journal[*pb.CheckResult] }

func (r *reported) take(_ context.Context, request *pb.ReportChecksRequest) error {
	for _, result := range request.GetResults() {
		r.add(result)
	}
	return nil
}

// texts returns a line for each result.
func (r *reported) texts() (lines []string) {
	for _, result := range r.entries() {
		text := "no fault"
		switch outcome := result.GetOutcome().(type) {
		case *pb.CheckResult_NoResult:
			text = outcome.NoResult
		case *pb.CheckResult_Finding:
			text = outcome.Finding.GetCode() + " " + outcome.Finding.GetEvidence()
		}
		lines = append(lines, fmt.Sprintf("%s %d: %s", result.GetDevice(), result.GetRun(), text))
	}
	return lines
}

func add(t *testing.T, c *Client, check HealthCheck) {
	t.Helper()
	if err := c.Check(check); err != nil {
		t.Fatal(err)
	}
}

func TestCheckRunsOnEachDeviceAndItsResultsAreReported(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		var declared journal[*pb.SyncDevicesRequest]
		a.checks = r.take
		a.sync = func(_ context.Context, request *pb.SyncDevicesRequest) error {
			declared.add(request)
			return nil
		}
		a.start()
		add(t, c, HealthCheck{
			Name: "link", Every: 10 * second, Timeout: 2 * second, RaiseAfter: 1,
			Devices: func(device Device) bool { return device.Name != "other" },
			Run: func(_ context.Context, device Device) (*Finding, error) {
				switch device.Name {
				case "bad":
					finding := Unhealthy("card.link", "link %d is down", 2)
					finding.Advice, finding.Repair = "reset it", RepairResetDevice
					return finding, nil
				case "sick":
					return nil, errors.New("no driver")
				}
				return nil, nil
			},
		})
		c.Declare(card("good"), card("bad"), card("sick"), card("other"))
		got := r.texts()
		slices.Sort(got)
		if want := []string{"bad 1: card.link link 2 is down", "good 1: no fault", "sick 1: no driver"}; !slices.Equal(got, want) {
			t.Errorf("reported %q, not %q", got, want)
		}
		for _, result := range r.entries() {
			if result.GetDevice() == "bad" {
				result.AgeS = 0
				want := &pb.CheckResult{
					Check: "link", Pool: "node-1", Device: "bad", EveryS: 10, LeaseS: 32, RaiseAfter: 1, Run: 1,
					Outcome: &pb.CheckResult_Finding{Finding: &pb.CheckFinding{
						Code: "card.link", Severity: pb.CheckSeverity_CHECK_SEVERITY_UNHEALTHY,
						Evidence: "link 2 is down", Advice: "reset it",
						Repair: pb.DeviceRepair_DEVICE_REPAIR_RESET_DEVICE,
					}},
				}
				if !proto.Equal(result, want) {
					t.Errorf("reported %v, not %v", result, want)
				}
			}
		}
		newest := declared.entries()[len(declared.entries())-1]
		var checked []string
		for _, device := range newest.GetDevices() {
			checked = append(checked, device.GetName()+"="+strings.Join(device.GetChecks(), ","))
		}
		if want := []string{"good=link", "bad=link", "sick=link", "other="}; !slices.Equal(checked, want) {
			t.Errorf("declared %q, not %q", checked, want)
		}
		time.Sleep(40 * second)
		if runs := len(r.entries()); runs < 4*3 || runs > 5*3 {
			t.Errorf("%d runs of three devices in 40 s", runs)
		}
	})
}

func TestHungCheckHasNoResultInEachPeriodAndIsNotCalledTwice(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		var calls atomic.Int32
		release := make(chan struct{})
		a.checks = r.take
		a.start()
		add(t, c, HealthCheck{
			Name: "link", Every: 10 * second, Timeout: 2 * second,
			Run: func(context.Context, Device) (*Finding, error) {
				if calls.Add(1) == 1 {
					<-release // ignores its context
				}
				return nil, nil
			},
		})
		c.Declare(card("a"))
		time.Sleep(35 * second)
		got := r.texts()
		if len(got) < 4 || calls.Load() != 1 {
			t.Errorf("%d calls, reported %q", calls.Load(), got)
		}
		for _, line := range got {
			if !strings.HasSuffix(line, noAnswerInTime) {
				t.Errorf("reported %q", line)
			}
		}
		close(release)
		time.Sleep(11 * second)
		if got := r.texts(); !strings.HasSuffix(got[len(got)-1], "no fault") || calls.Load() < 2 {
			t.Errorf("after its return: %d calls, reported %q", calls.Load(), got)
		}
	})
}

// TestHungCheckWithALongTimeoutHasNoResultInEachPeriod covers runs after one that hangs: they do not wait for its
// timeout again.
func TestHungCheckWithALongTimeoutHasNoResultInEachPeriod(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		release := make(chan struct{})
		defer close(release)
		a.checks = r.take
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: 10 * second, Timeout: 60 * second, Run: func(context.Context, Device) (*Finding, error) {
			<-release
			return nil, nil
		}})
		c.Declare(card("a"))
		time.Sleep(95 * second)
		if got := r.texts(); len(got) < 3 {
			t.Errorf("reported only %q", got)
		}
	})
}

func TestCheckThatReturnsItsContextsErrorHasTheSameTextAsAHungOne(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = r.take
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: second, Run: func(ctx context.Context, _ Device) (*Finding, error) {
			<-ctx.Done()
			return nil, fmt.Errorf("after %s: %w", time.Now(), ctx.Err())
		}})
		c.Declare(card("a"))
		time.Sleep(5 * second)
		for _, line := range r.texts() {
			if !strings.HasSuffix(line, noAnswerInTime) {
				t.Errorf("reported %q", line)
			}
		}
	})
}

// TestOutcomeOfARunThatHasReturnedCounts covers a busy machine: the context of a run is cancelled when the run has
// returned, possibly before the result is read.
func TestOutcomeOfARunThatHasReturnedCounts(t *testing.T) {
	for range 50 { // select takes a random one of several cases
		timed, cancel := context.WithCancel(t.Context())
		returned := make(chan outcome, 1)
		returned <- outcome{finding: Degraded("card.slow", "slow")}
		cancel()
		if found := outcomeOf(t.Context(), timed, returned); found.finding == nil {
			t.Fatalf("the outcome is %v", found)
		}
	}
}

func TestCheckThatPanicsHasNoResultAndRunsAgain(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		var calls atomic.Int32
		a.checks = r.take
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: 10 * second, Run: func(context.Context, Device) (*Finding, error) {
			if calls.Add(1) < 3 {
				panic("no such link")
			}
			return nil, nil
		}})
		c.Declare(card("a"))
		time.Sleep(25 * second)
		panicked := "the check panicked: no such link"
		if got, want := r.texts(), []string{"a 1: " + panicked, "a 2: " + panicked, "a 3: no fault"}; !slices.Equal(got, want) {
			t.Errorf("reported %q, not %q", got, want)
		}
	})
}

func TestFunctionDevicesOfACheckMayCallTheClient(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = r.take
		a.start()
		run := func(context.Context, Device) (*Finding, error) { return nil, nil }
		var called atomic.Bool
		add(t, c, HealthCheck{Name: "link", Every: time.Hour, Run: run, Devices: func(Device) bool {
			if !called.Swap(true) {
				c.Declare(card("a"), card("b"))
			}
			return true
		}})
		c.Declare(card("a"))
		got := r.texts()
		slices.Sort(got)
		if want := []string{"a 1: no fault", "b 1: no fault"}; !slices.Equal(got, want) {
			t.Errorf("reported %q, not %q", got, want)
		}
	})
}

func TestNewAgentGetsTheNewestResultsWithTheirAge(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = r.take
		a.health = sendLists(healthy("a"))
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: time.Hour, Run: func(context.Context, Device) (*Finding, error) {
			return nil, nil
		}})
		c.Declare(card("a"))
		k := startKubelet(ctx, c)
		synctest.Wait()
		time.Sleep(60 * second)
		a.stop()
		before := len(r.entries())
		time.Sleep(60 * second)
		a.start()
		time.Sleep(5 * second)
		all := r.entries()
		newest := all[len(all)-1]
		if len(all) == before || newest.GetRun() != 1 || newest.GetAgeS() < 119 || newest.GetAgeS() > 126 {
			t.Errorf("%d results before the restart, then %v", before, all[before:])
		}
		k.received(t)
	})
}

func TestResultsOfAnAbsentAgentAreReplacedByNewerOnes(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		var runs atomic.Int64
		a.checks = r.take
		add(t, c, HealthCheck{Name: "link", Every: 10 * second, Run: func(context.Context, Device) (*Finding, error) {
			return Degraded("card.slow", "run %d", runs.Add(1)), nil
		}})
		c.Declare(card("a"))
		time.Sleep(95 * second)
		a.start()
		newest := runs.Load()
		time.Sleep(3 * second)
		if got := r.entries(); len(got) == 0 || got[0].GetRun() < newest {
			t.Errorf("reported %v, the newest run was %d", got, newest)
		}
	})
}

func TestDevicesWithChecksAreUnknownWithAnAgentThatDoesNotKnowThem(t *testing.T) {
	var complaints journal[string]
	note := OnError(func(_ context.Context, err error, msg string) { complaints.add(msg) })
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(healthy("a"), healthy("b"))
		a.start()
		add(t, c, HealthCheck{
			Name: "link", Every: 10 * second, Devices: func(device Device) bool { return device.Name == "a" },
			Run: func(context.Context, Device) (*Finding, error) { return nil, nil },
		})
		c.Declare(cpu("a"), cpu("b"))
		k := startKubelet(ctx, c)
		time.Sleep(5 * second)
		newest := map[string]reportedHealth{}
		for _, health := range k.received(t) {
			newest[health.device] = health
		}
		if a, b := newest["a"], newest["b"]; a.health != kubeletplugin.HealthStatusUnknown || a.text != noChecks ||
			b.health != kubeletplugin.HealthStatusHealthy {
			t.Errorf("the kubelet has the health %v", newest)
		}
		a.stop()
		a.checks = func(context.Context, *pb.ReportChecksRequest) error { return nil }
		a.start()
		time.Sleep(15 * second)
		a.stop()
		a.start()
		time.Sleep(5 * second)
		for _, health := range k.received(t) {
			newest[health.device] = health
		}
		if newest["a"].health != kubeletplugin.HealthStatusHealthy {
			t.Errorf("after the agent's update the kubelet has %v", newest)
		}
		if got, want := complaints.entries(), []string{noChecks}; !slices.Equal(got, want) {
			t.Errorf("OnError got %q, not %q", got, want)
		}
	}, note)
}

func TestDeviceIsUnknownWithAnOldAgentBeforeItsFirstResult(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.sync = func(ctx context.Context, _ *pb.SyncDevicesRequest) error {
			sleep(ctx, second)
			return nil
		}
		a.health = sendLists(healthy("a"))
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: time.Minute, Run: func(ctx context.Context, _ Device) (*Finding, error) {
			sleep(ctx, time.Hour)
			return nil, ctx.Err()
		}})
		c.Declare(cpu("a"))
		k := startKubelet(ctx, c)
		time.Sleep(10 * second)
		got := k.received(t)
		if slices.ContainsFunc(got, func(entry reportedHealth) bool { return entry.health != isUnknown }) ||
			len(got) == 0 || got[len(got)-1].text != noChecks {
			t.Errorf("the kubelet received %v", got)
		}
	})
}

func TestDevicesThatAnOldAgentRefusesAreUnknownWithTheReason(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.sync = func(context.Context, *pb.SyncDevicesRequest) error {
			return status.Error(codes.InvalidArgument, "devices[0].part: not set, or unknown to this agent")
		}
		a.health = sendEvery(10*second, healthy("cpu-node0"), healthy("cpu-node0"))
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: 10 * second, Run: func(context.Context, Device) (*Finding, error) {
			return nil, nil
		}})
		c.Declare(card("a"))
		k := startKubelet(ctx, c)
		time.Sleep(25 * second)
		var newest reportedHealth
		for _, health := range k.received(t) {
			if health.device == "a" {
				newest = health
			}
		}
		if newest.health != kubeletplugin.HealthStatusUnknown || newest.text != noChecks || newest.lease != defaultLease {
			t.Errorf("the kubelet has the health %v", newest)
		}
	})
}

func TestDevicesThatAnOldAgentRefusesMakeNoSilentAgent(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.sync = func(context.Context, *pb.SyncDevicesRequest) error {
			return status.Error(codes.InvalidArgument, "devices[0].part: not set, or unknown to this agent")
		}
		slow := listOf("cpu-node0", healthv1.HealthStatus_HEALTHY, 180, "")
		a.health = func(stream healthStream) error {
			if err := stream.Send(slow); err != nil {
				return err
			}
			return sendEvery(60*second, slow, slow, slow)(stream)
		}
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: 10 * second, Run: func(context.Context, Device) (*Finding, error) {
			return nil, nil
		}})
		c.Declare(card("a"))
		k := startKubelet(ctx, c)
		time.Sleep(5 * second)
		k.received(t)
		time.Sleep(170 * second)
		got := k.received(t)
		for _, entry := range got {
			if entry.text != "" && entry != (reportedHealth{entry.at, "a", isUnknown, noChecks, 180 * second}) {
				t.Errorf("the kubelet received %v", entry)
			}
		}
		if len(got) < 2 {
			t.Errorf("the kubelet received only %v", got)
		}
	})
}

func TestChangeOfOneDeviceDoesNotChangeOthersWithAnOldAgent(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		faulty := listOf("a", healthv1.HealthStatus_UNHEALTHY, 30, "cpu.offline")
		a.health = func(stream healthStream) error {
			if err := stream.Send(faulty); err != nil {
				return err
			}
			return sendEvery(4*second, healthy("b"), faulty, healthy("b"))(stream)
		}
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: 10 * second, Run: func(context.Context, Device) (*Finding, error) {
			return nil, nil
		}})
		c.Declare(cpu("a"), cpu("b"))
		k := startKubelet(ctx, c)
		time.Sleep(3 * second)
		k.received(t)
		time.Sleep(11 * second)
		for _, got := range k.received(t) {
			if got.device == "a" && got.health != kubeletplugin.HealthStatusUnhealthy {
				t.Errorf("the kubelet received %v", got)
			}
		}
	})
}

func TestFindingThatADriverReusesIsReportedAsItWas(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = r.take
		finding := Unhealthy("card.link", "link is down")
		add(t, c, HealthCheck{Name: "link", Every: time.Hour, Run: func(context.Context, Device) (*Finding, error) {
			return finding, nil
		}})
		c.Declare(card("a"))
		synctest.Wait()
		finding.Evidence = "changed"
		a.start()
		time.Sleep(second / 2)
		if got, want := r.texts(), "a 1: card.link link is down"; len(got) == 0 || got[0] != want {
			t.Errorf("reported %q, not %q first", got, want)
		}
	})
}

func TestRefusedResultBecomesNoResult(t *testing.T) {
	var complaints journal[string]
	note := OnError(func(_ context.Context, err error, msg string) { complaints.add(msg) })
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = func(ctx context.Context, request *pb.ReportChecksRequest) error {
			for _, result := range request.GetResults() {
				if result.GetFinding().GetCode() == "nodots" {
					return status.Error(codes.InvalidArgument, "finding code 'nodots' is not a dotted code")
				}
			}
			return r.take(ctx, request)
		}
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: 10 * second, Run: func(_ context.Context, device Device) (*Finding, error) {
			if device.Name == "a" {
				return Unhealthy("nodots", "x"), nil
			}
			return nil, nil
		}})
		c.Declare(card("a"), card("b"))
		time.Sleep(25 * second)
		seen := map[string]bool{}
		for _, line := range r.texts() {
			device, _, _ := strings.Cut(line, " ")
			_, text, _ := strings.Cut(line, ": ")
			seen[device+": "+text] = true
		}
		if want := "a: result refused: finding code 'nodots' is not a dotted code"; len(seen) != 2 || !seen[want] || !seen["b: no fault"] {
			t.Errorf("unexpected reports: %v", seen)
		}
		if got := complaints.entries(); len(got) != 1 {
			t.Errorf("OnError got the text %q", got)
		}
	}, note)
}

func TestResultsWithTheLongestTextsFitIntoARequest(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = func(ctx context.Context, request *pb.ReportChecksRequest) error {
			if size := proto.Size(request); size > 512<<10 {
				t.Errorf("%d results are %d bytes", len(request.GetResults()), size)
			}
			return r.take(ctx, request)
		}
		long := strings.Repeat("x", 1<<13)
		add(t, c, HealthCheck{Name: "link", Every: time.Hour, Run: func(context.Context, Device) (*Finding, error) {
			return &Finding{Code: "\xff" + long, Evidence: long, Advice: long}, nil
		}})
		var devices []Device
		for number := range 200 {
			devices = append(devices, card(fmt.Sprintf("%063d", number)))
			devices[number].Pool = long[:253]
		}
		c.Declare(devices...)
		time.Sleep(2 * second) // no agent: all results wait
		a.start()
		time.Sleep(5 * second)
		if got := len(r.entries()); got < len(devices) {
			t.Errorf("%d results of %d devices", got, len(devices))
		}
	})
}

func TestRemovedDeviceIsNoLongerChecked(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = r.take
		a.start()
		var runs atomic.Int64
		add(t, c, HealthCheck{Name: "link", Every: second, Run: func(_ context.Context, device Device) (*Finding, error) {
			runs.Add(1)
			return Unknown("card.part", "%v", device.Part), nil
		}})
		c.Declare(card("a"), card("b"))
		time.Sleep(5 * second)
		c.Declare(Device{Name: "a", Pool: "node-1", Part: PCI{Address: "0000:01:00.0"}})
		time.Sleep(2 * second)
		before, ran := len(r.texts()), runs.Load()
		time.Sleep(5 * second)
		if more := runs.Load() - ran; more > 6 {
			t.Errorf("%d runs in 5 s", more)
		}
		for _, line := range r.texts()[before:] {
			if !strings.HasPrefix(line, "a ") || !strings.HasSuffix(line, "{0000:01:00.0 }") {
				t.Errorf("reported %q", line)
			}
		}
	})
}

// TestOtherHardwareUnderANameIsCheckedAgainOnceItIsDeclared covers a long period: without another run the device
// would have no result until its end, because the agent ignores results from before the declaration.
func TestOtherHardwareUnderANameIsCheckedAgainOnceItIsDeclared(t *testing.T) {
	for _, test := range []struct {
		name  string
		again func(*Client)
	}{
		{"changed", func(*Client) {}},
		{"removed before", func(c *Client) { c.Declare() }},
	} {
		t.Run(test.name, func(t *testing.T) {
			withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
				var r reported
				a.checks = r.take
				a.sync = func(ctx context.Context, _ *pb.SyncDevicesRequest) error {
					sleep(ctx, second) // the agent evaluates the devices
					return nil
				}
				a.start()
				add(t, c, HealthCheck{Name: "link", Every: time.Hour, Run: func(_ context.Context, device Device) (*Finding, error) {
					return Unknown("card.part", "%v", device.Part), nil
				}})
				c.Declare(Device{Name: "a", Pool: "node-1", Part: PCI{Address: "0000:01:00.0"}}, card("b"))
				time.Sleep(5 * second)
				test.again(c)
				time.Sleep(5 * second)
				first := len(r.texts())
				c.Declare(Device{Name: "a", Pool: "node-1", Part: PCI{Address: "0000:02:00.0"}}, card("b"))
				time.Sleep(second / 2)
				before := len(r.texts())
				time.Sleep(5 * second)
				var newest string
				for _, line := range r.texts()[before:] {
					if strings.HasPrefix(line, "a ") {
						newest = line
					}
				}
				if want := "a 2: card.part {0000:02:00.0 }"; newest != want {
					t.Errorf("after the answer %q, not %q; all: %q, %d before", newest, want, r.texts(), first)
				}
			})
		})
	}
}

// TestCheckRunsAgainOnceTheFirstDeclarationIsAccepted covers a driver that was restarted with other hardware: the agent
// ignores results from before its declaration.
func TestCheckRunsAgainOnceTheFirstDeclarationIsAccepted(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = r.take
		a.sync = func(ctx context.Context, _ *pb.SyncDevicesRequest) error {
			sleep(ctx, second)
			return nil
		}
		a.start()
		for name, takes := range map[string]time.Duration{"link": 0, "memory": 10 * second} {
			add(t, c, HealthCheck{Name: name, Every: time.Hour, Run: func(context.Context, Device) (*Finding, error) {
				time.Sleep(takes)
				return Degraded("card.slow", "%s", name), nil
			}})
		}
		c.Declare(cpu("a"))
		time.Sleep(29 * time.Minute)
		// a run that ends after the declaration is about the declared hardware; the repetition has the number of its run
		if got, want := r.texts(), []string{"a 1: card.slow link", "a 1: card.slow link", "a 1: card.slow memory"}; !slices.Equal(got, want) {
			t.Errorf("reported %q, not %q", got, want)
		}
	})
}

func TestRunInProgressAtTheFirstDeclarationCountsOnce(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = r.take
		a.sync = func(ctx context.Context, _ *pb.SyncDevicesRequest) error {
			sleep(ctx, 2*second+second/5)
			return nil
		}
		a.start()
		var runs atomic.Int32
		add(t, c, HealthCheck{Name: "link", Every: 2 * second, Run: func(ctx context.Context, _ Device) (*Finding, error) {
			number := runs.Add(1)
			if number > 1 { // the second run begins after one to two seconds, and ends after the declaration
				sleep(ctx, second+second/2)
			}
			return Degraded("card.slow", "run %d", number), nil
		}})
		c.Declare(cpu("a"))
		time.Sleep(4 * second)
		if got, want := r.texts(), []string{"a 1: card.slow run 1", "a 2: card.slow run 2"}; !slices.Equal(got, want) {
			t.Errorf("reported %q, not %q", got, want)
		}
	})
}

func TestResultAboutFormerHardwareIsNotReported(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = r.take
		a.start()
		add(t, c, HealthCheck{Name: "link", Every: 10 * second, Run: func(ctx context.Context, device Device) (*Finding, error) {
			time.Sleep(2 * second)
			return Unhealthy("card.part", "%v", device.Part), nil
		}})
		c.Declare(Device{Name: "a", Pool: "node-1", Part: PCI{Address: "0000:01:00.0"}})
		time.Sleep(second)
		c.Declare(Device{Name: "a", Pool: "node-1", Part: PCI{Address: "0000:02:00.0"}})
		time.Sleep(13 * second) // the second run of a period from 5 to 10 s has ended
		for _, line := range r.texts() {
			if strings.Contains(line, "0000:01") {
				t.Errorf("reported %q", line)
			}
		}
	})
}

// TestCheckOfOtherHardwareWaitsUntilTheFormerRunHasReturned covers a check of former hardware that ignores its context:
// both runs would use the device at once.
func TestCheckOfOtherHardwareWaitsUntilTheFormerRunHasReturned(t *testing.T) {
	for _, test := range []struct {
		name        string
		replacedAt  time.Duration // the timeout is 2 s
		returnsAt   time.Duration
		wantResults []string
	}{
		{"replaced during a run", second, 2 * second, []string{"a 1: card.part {0000:02:00.0 }"}},
		{"replaced during a hung run", 5 * second, 6 * second, []string{"a 1: " + noAnswerInTime, "a 2: card.part {0000:02:00.0 }"}},
		{"returns late", 5 * second, 9 * second, []string{"a 1: " + noAnswerInTime, "a 2: " + noAnswerInTime, "a 3: card.part {0000:02:00.0 }"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
				var r reported
				var running, most atomic.Int32
				a.checks = r.take
				a.start()
				began := time.Now()
				add(t, c, HealthCheck{Name: "link", Every: 20 * second, Timeout: 2 * second, Run: func(_ context.Context, device Device) (*Finding, error) {
					most.Store(max(most.Load(), running.Add(1)))
					defer running.Add(-1)
					time.Sleep(time.Until(began.Add(test.returnsAt)))
					return Degraded("card.part", "%v", device.Part), nil
				}})
				c.Declare(Device{Name: "a", Pool: "node-1", Part: PCI{Address: "0000:01:00.0"}})
				time.Sleep(test.replacedAt)
				c.Declare(Device{Name: "a", Pool: "node-1", Part: PCI{Address: "0000:02:00.0"}})
				c.Declare() // the name stays in use while no device has it
				c.Declare(Device{Name: "a", Pool: "node-1", Part: PCI{Address: "0000:02:00.0"}})
				time.Sleep(29*second - test.replacedAt)
				if most.Load() != 1 {
					t.Errorf("%d runs at once", most.Load())
				}
				got := r.texts()
				if got = slices.Compact(got); !slices.Equal(got[:min(len(got), len(test.wantResults))], test.wantResults) {
					t.Errorf("reported %q, not %q first", got, test.wantResults)
				}
			})
		})
	}
}

func TestCloseWaitsForACheckThatEndsWithItsContext(t *testing.T) {
	for _, test := range []struct {
		name       string
		takes      time.Duration
		wantClosed time.Duration
	}{
		{"ends", second / 10, second / 10},
		{"ignores its context", 30 * second, budget},
	} {
		t.Run(test.name, func(t *testing.T) {
			withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
				var ended atomic.Bool
				a.checks = func(context.Context, *pb.ReportChecksRequest) error { return nil }
				a.start()
				add(t, c, HealthCheck{Name: "link", Every: time.Minute, Run: func(ctx context.Context, _ Device) (*Finding, error) {
					<-ctx.Done()
					time.Sleep(test.takes)
					ended.Store(true)
					return nil, ctx.Err()
				}})
				c.Declare(card("a"))
				time.Sleep(second)
				began := time.Now()
				c.Close()
				if took := time.Since(began); took != test.wantClosed || ended.Load() != (test.takes < budget) {
					t.Errorf("closed after %s, the check has ended: %t", took, ended.Load())
				}
				time.Sleep(30 * second)
			})
		})
	}
}

func TestRecheckRunsACheckAtOnce(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		a.checks = r.take
		a.start()
		for _, name := range []string{"link", "memory"} {
			add(t, c, HealthCheck{Name: name, Every: time.Hour, Run: func(context.Context, Device) (*Finding, error) {
				return Degraded("card.slow", "%s", name), nil
			}})
		}
		c.Declare(card("a"))
		time.Sleep(5 * second)
		before := len(r.texts())
		if err := c.Recheck("link"); err != nil {
			t.Error(err)
		}
		if got, want := r.texts()[before:], []string{"a 2: card.slow link"}; !slices.Equal(got, want) {
			t.Errorf("reported %q, not %q", got, want)
		}
		time.Sleep(29 * time.Minute) // the first period is at least half of Every
		if err := c.Recheck(""); err != nil {
			t.Error(err)
		}
		time.Sleep(59 * time.Minute)
		got := r.texts()[before+1:]
		slices.Sort(got)
		if want := []string{"a 2: card.slow memory", "a 3: card.slow link"}; !slices.Equal(got, want) {
			t.Errorf("reported %q, not %q", got, want)
		}
		if err := c.Recheck("lnk"); err == nil || !strings.Contains(err.Error(), `check "lnk" does not exist`) {
			t.Error(err)
		}
	})
}

func TestHungChecksDoNotDelayOthersForLongerThanTheirTimeout(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var r reported
		release := make(chan struct{})
		defer close(release)
		a.checks = r.take
		a.start()
		add(t, c, HealthCheck{
			Name: "link", Every: 20 * second, Timeout: 2 * second,
			Run: func(_ context.Context, device Device) (*Finding, error) {
				if strings.HasPrefix(device.Name, "hung") {
					<-release
				}
				return nil, nil
			},
		})
		devices := []Device{card("well")}
		for number := range 32 {
			devices = append(devices, card(fmt.Sprintf("hung-%d", number)))
		}
		c.Declare(devices...)
		time.Sleep(6 * second)
		if got := r.texts(); !slices.Contains(got, "well 1: no fault") || len(got) != len(devices) {
			t.Errorf("reported %q", got)
		}
	})
}

func TestWrongCheckIsAnError(t *testing.T) {
	run := func(context.Context, Device) (*Finding, error) { return nil, nil }
	withFakeClock(t, func(_ context.Context, t *testing.T, _ *fakeAgent, c *Client) {
		add(t, c, HealthCheck{Name: "taken", Every: second, Run: run})
		for want, check := range map[string]HealthCheck{
			"name: ":                   {Name: "Link", Every: second, Run: run},
			"every 1ms is not within":  {Name: "a", Every: time.Millisecond, Run: run},
			"timeout 2h0m0s":           {Name: "a", Every: second, Timeout: 2 * time.Hour, Run: run},
			"raise after -1":           {Name: "a", Every: second, RaiseAfter: -1, Run: run},
			"has no function Run":      {Name: "a", Every: second},
			"the name is taken":        {Name: "taken", Every: second, Run: run},
			"clear after 1001: not wi": {Name: "a", Every: second, ClearAfter: 1001, Run: run},
		} {
			if err := c.Check(check); err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("the text %q is not in the error %v", want, err)
			}
		}
		for number := range checksMax - 1 {
			add(t, c, HealthCheck{Name: fmt.Sprintf("n-%d", number), Every: second, Run: run})
		}
		if err := c.Check(HealthCheck{Name: "more", Every: second, Run: run}); err == nil {
			t.Error("a check above the limit is accepted")
		}
	})
}
