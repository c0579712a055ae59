// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	pb "drahealth.example.com/go/drahealthv1"
)

func TestDevicesAreDeclaredBeforeEachHealthStream(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(healthy("a"))
		a.start()
		c.Declare(cpu("a"))
		synctest.Wait()
		k := startKubelet(ctx, c)
		synctest.Wait()
		a.stop()
		time.Sleep(5 * second)
		a.start()
		time.Sleep(2 * second)
		synctest.Wait()
		if want := []string{"sync", "sync", "health", "sync", "health"}; !slices.Equal(a.asked, want) {
			t.Errorf("calls of the agent are %v, not %v", a.asked, want)
		}
		k.received(t)
	})
}

func TestNewestDevicesAreDeclaredWithoutAStream(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var last *pb.SyncDevicesRequest
		a.sync = func(_ context.Context, request *pb.SyncDevicesRequest) error {
			last = request
			return nil
		}
		c.Declare(cpu("old"))
		time.Sleep(second)
		c.Declare(cpu("a"), cpu("b"))
		a.start()
		time.Sleep(2 * declareMax)
		synctest.Wait()
		if len(last.GetDevices()) != 2 {
			t.Errorf("unexpected last call: %v", last)
		}
	})
}

// TestNewInstancesDevicesReplaceThoseOfTheFormerOne covers a rolling update: after a restart of the agent, the former
// instance of the driver may be the last one to declare its devices.
func TestNewInstancesDevicesReplaceThoseOfTheFormerOne(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var calls journal[string]
		a.sync = func(_ context.Context, request *pb.SyncDevicesRequest) error {
			calls.add(request.GetDevices()[0].GetName())
			return nil
		}
		a.start()
		former, err := New(driverName, func(c *Client) { c.dial = a.dial })
		if err != nil {
			t.Fatal(err)
		}
		defer former.Close()
		former.Declare(cpu("former"))
		time.Sleep(2 * declareWatch)
		before := len(calls.entries())
		c.Declare(cpu("new"))
		synctest.Wait()
		c.declareAgain(t.Context()) // the agent is a new one
		former.declareAgain(t.Context())
		time.Sleep(declareEvery + second)
		if got := calls.entries()[before:]; !slices.Equal(got, []string{"new", "new", "former", "new"}) {
			t.Errorf("the agent got the devices of %q", got)
		}
		time.Sleep(2 * declareEvery)
		before = len(calls.entries())
		newest, err := New(driverName, func(c *Client) { c.dial = a.dial })
		if err != nil {
			t.Fatal(err)
		}
		defer newest.Close()
		newest.Declare(cpu("newest"))
		time.Sleep(10 * declareEvery)
		if got := calls.entries()[before:]; !slices.Equal(got, []string{"newest"}) {
			t.Errorf("the agent got the devices of %q during the next update", got)
		}
		time.Sleep(2 * declareWatch)
		got := len(calls.entries())
		time.Sleep(declareWatch)
		if more := len(calls.entries()) - got; more > 0 {
			t.Errorf("declared %d times more", more)
		}
	})
}

func TestInvalidDevicesAreDeclaredOncePerStreamAndReportedOnce(t *testing.T) {
	var complaints []error
	handle := OnError(func(_ context.Context, err error, _ string) { complaints = append(complaints, err) })
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.sync = func(context.Context, *pb.SyncDevicesRequest) error {
			return status.Error(codes.InvalidArgument, "devices[0].name: 70 bytes, limit 63")
		}
		a.health = sendLists(healthy("cpu-node0"))
		a.start()
		c.Declare(cpu("a"))
		k := startKubelet(ctx, c)
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		declared := a.count("sync")
		if declared > 1+a.count("health") || len(complaints) != 1 || !errors.Is(complaints[0], kubeletplugin.ErrRecoverable) ||
			!strings.Contains(complaints[0].Error(), "limit 63") {
			t.Errorf("declared %d times to %d streams, OnError got %v", declared, a.count("health"), complaints)
		}
		c.Declare(cpu("b"))
		synctest.Wait()
		if a.count("sync") != declared+1 || len(complaints) != 2 {
			t.Errorf("declared %d times, OnError got %v", a.count("sync"), complaints)
		}
		k.received(t)
	}, handle)
}

func TestDevicesThatAnOldAgentRefusedAreDeclaredToTheNextAgent(t *testing.T) {
	var complaints journal[error]
	handle := OnError(func(_ context.Context, err error, _ string) { complaints.add(err) })
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var accepted journal[*pb.SyncDevicesRequest]
		a.sync = func(context.Context, *pb.SyncDevicesRequest) error {
			return status.Error(codes.InvalidArgument, "devices[0].part: not set, or unknown to this agent")
		}
		a.health = sendLists(healthy("cpu-node0"))
		a.start()
		c.Declare(cpu("a"))
		k := startKubelet(ctx, c)
		time.Sleep(time.Minute)
		synctest.Wait()
		a.stop()
		a.sync = func(_ context.Context, request *pb.SyncDevicesRequest) error {
			accepted.add(request)
			return nil
		}
		a.start()
		time.Sleep(5 * second)
		if got := accepted.entries(); len(got) == 0 || got[0].GetDevices()[0].GetName() != "a" {
			t.Errorf("the new agent got %v", got)
		}
		if got := complaints.entries(); len(got) != 1 {
			t.Errorf("OnError got the error %v", got)
		}
		k.received(t)
	}, handle)
}

func TestRefusedDevicesAreRetriedAndReportedOnce(t *testing.T) {
	var complaints []error
	handle := OnError(func(_ context.Context, err error, _ string) { complaints = append(complaints, err) })
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var mended atomic.Bool
		a.sync = func(context.Context, *pb.SyncDevicesRequest) error {
			if mended.Load() {
				return nil
			}
			return status.Error(codes.FailedPrecondition, "devices.d/test.toml: not written by drahealth")
		}
		a.start()
		c.Declare(cpu("a"))
		time.Sleep(5 * time.Minute)
		mended.Store(true)
		time.Sleep(declareMax)
		tried := a.count("sync")
		time.Sleep(time.Hour)
		synctest.Wait()
		if more := a.count("sync") - tried; tried < 5 || more > int(time.Hour/declareEvery) || len(complaints) != 1 {
			t.Errorf("declared %d times, then %d, OnError got %v", tried, a.count("sync"), complaints)
		}
	}, handle)
}

func TestCorrectedDevicesAreDeclaredAtOnce(t *testing.T) {
	withFakeClock(t, func(_ context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.sync = func(_ context.Context, request *pb.SyncDevicesRequest) error {
			if len(request.GetDevices()) > 1 {
				return status.Error(codes.ResourceExhausted, "devices: 2, limit 1")
			}
			return nil
		}
		a.start()
		c.Declare(cpu("a"), cpu("b"))
		time.Sleep(5*time.Minute + second/2)
		synctest.Wait()
		tried := a.count("sync")
		c.Declare(cpu("a"))
		synctest.Wait()
		if a.count("sync") != tried+1 {
			t.Errorf("declared %d times, then %d", tried, a.count("sync"))
		}
	})
}

func TestHealthOfOlderAgentWithoutDeclarationsIsForwarded(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.sync = nil
		a.health = sendLists(healthy("a"))
		a.start()
		c.Declare(cpu("a"))
		startKubelet(ctx, c).expect(t, reportedHealth{0, "a", isHealthy, "", 30 * second})
	})
}

func TestMethodsOfClosedClientReturn(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		if err := errors.Join(c.Close(), c.Close()); err != nil {
			t.Error(err)
		}
		c.Declare(cpu("a"))
		results, err := c.Prepare(ctx, claims("well"), prepares("well"))
		if err != nil || results["well"].Err != nil {
			t.Errorf("unexpected results %v or error %v", results, err)
		}
	})
}

func TestPartsOfDevicesAreDeclared(t *testing.T) {
	for _, test := range []struct {
		device Device
		want   *pb.DeclaredDevice
	}{
		{
			Device{Name: "c", Pool: "p", Lease: 1500 * time.Millisecond, Part: CPUs{List: "0-3", NUMA: new(1), Exclusive: true, Isolated: true}},
			&pb.DeclaredDevice{Name: "c", Pool: "p", LeaseS: 2, Part: &pb.DeclaredDevice_Cpus{
				Cpus: &pb.CpusPart{Cpus: "0-3", Numa: new(int64(1)), Exclusive: true, Isolated: true}}},
		},
		{
			Device{Part: Hugepages{Size: "2Mi", Pages: 8, NUMA: 1}},
			&pb.DeclaredDevice{Part: &pb.DeclaredDevice_Hugepages{Hugepages: &pb.HugepagesPart{Size: "2Mi", Pages: 8, Numa: 1}}},
		},
		{
			Device{Part: Memory{Size: "64Gi", NUMA: 1}},
			&pb.DeclaredDevice{Part: &pb.DeclaredDevice_Memory{Memory: &pb.MemoryPart{Size: "64Gi", Numa: 1}}},
		},
		{
			Device{Part: GPU{PCI: "0000:3b:00.0", UUID: "GPU-1", GI: new(1), CI: new(0)}},
			&pb.DeclaredDevice{Part: &pb.DeclaredDevice_Gpu{Gpu: &pb.GpuPart{
				Pci: "0000:3b:00.0", Uuid: "GPU-1", Gi: new(int64(1)), Ci: new(int64(0))}}},
		},
		{
			Device{Part: NIC{PCI: "0000:41:00.0", RDMA: "mlx5_0"}},
			&pb.DeclaredDevice{Part: &pb.DeclaredDevice_Nic{Nic: &pb.NicPart{Pci: "0000:41:00.0", Rdma: "mlx5_0"}}},
		},
		{
			Device{Part: PCI{Address: "0000:5e:00.1", Driver: "vfio-pci"}},
			&pb.DeclaredDevice{Part: &pb.DeclaredDevice_Pci{Pci: &pb.PciPart{Address: "0000:5e:00.1", Driver: "vfio-pci"}}},
		},
		{Device{Name: "without part"}, &pb.DeclaredDevice{Name: "without part"}},
	} {
		if got := messageOf(test.device); !proto.Equal(got, test.want) {
			t.Errorf("%v\n  is declared as %v\n  not %v", test.device, got, test.want)
		}
	}
}

func TestClientWithUnusableNameOrSocketIsRefused(t *testing.T) {
	for _, test := range []struct {
		driver, socket, want string
	}{
		{"", "", `driver name ""`},
		{"GPU.example.com", "", "lower case"},
		{driverName, "/" + strings.Repeat("x", 107), "108 bytes, limit 107"},
	} {
		if c, err := New(test.driver, Socket(test.socket)); c != nil || err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v is not %q", err, test.want)
		}
	}
}

func TestEmptyOptionsAreTheDefaults(t *testing.T) {
	c, err := New(driverName, Socket(""), OnError(nil))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if want := "/run/drahealth/drivers/" + driverName + ".sock"; c.socket != want {
		t.Errorf("%s, not %s", c.socket, want)
	}
	c.complain(t.Context(), errors.New("refused"), "logged")
}

// --- taints -----------------------------------------------------------------------------------------

func tainted(name string, effects ...pb.TaintEffect) *pb.DeviceTaints {
	device := &pb.TaintedDevice{Pool: "node-1", Name: name}
	for _, effect := range effects {
		device.Taints = append(device.Taints, &pb.DeviceTaint{Key: driverName + "/lost", Effect: effect, TimeAddedS: 1_790_000_000})
	}
	return &pb.DeviceTaints{Devices: []*pb.TaintedDevice{device, {Pool: "node-1", Name: "well"}}}
}

func TestTaintsHaveAllFieldsAndTheirTime(t *testing.T) {
	taints := taintsOf(tainted("a", pb.TaintEffect_TAINT_EFFECT_NO_EXECUTE, pb.TaintEffect_TAINT_EFFECT_NONE, 9))
	of, known := taints["node-1"]["a"], taints["node-1"]["well"]
	if len(of) != 3 || known == nil || len(known) != 0 || of[0].Key != driverName+"/lost" || of[0].TimeAdded.Unix() != 1_790_000_000 {
		t.Fatalf("unexpected taints: %v", taints)
	}
	if of[0].Effect != resourceapi.DeviceTaintEffectNoExecute || of[2].Effect != resourceapi.DeviceTaintEffectNone {
		t.Errorf("unexpected result: %v", of)
	}
	if taints.SliceLimit("node-1") != 64 || taints.SliceLimit("node-2") != 128 {
		t.Error("a pool with a taint has slices of 64 devices, another of 128")
	}
	if rest := taints.Without(resourceapi.DeviceTaintEffectNone); len(rest["node-1"]["a"]) != 1 || len(of) != 3 {
		t.Errorf("unexpected remaining taints: %v", rest)
	}
	informing := taintsOf(tainted("a", pb.TaintEffect_TAINT_EFFECT_NONE)).Without(resourceapi.DeviceTaintEffectNone)
	if informing.SliceLimit("node-1") != 128 {
		t.Errorf("unexpected informing taints: %v", informing)
	}
}

func TestSlowPublishGetsTheNewestTaints(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.taints = func(stream grpc.ServerStreamingServer[pb.DeviceTaints]) error {
			for _, name := range []string{"a", "b", "c", "d"} {
				if err := stream.Send(tainted(name, pb.TaintEffect_TAINT_EFFECT_NO_SCHEDULE)); err != nil {
					return err
				}
				time.Sleep(second)
			}
			<-stream.Context().Done()
			return nil
		}
		a.start()
		var published [][]string
		go c.WatchTaints(ctx, func(_ context.Context, taints Taints) error {
			published = append(published, slices.Sorted(maps.Keys(taints["node-1"])))
			time.Sleep(time.Minute)
			return nil
		})
		time.Sleep(10 * time.Minute)
		synctest.Wait()
		if len(published) != 2 || published[0][0] != "a" || published[1][0] != "d" {
			t.Errorf("unexpected published slices: %v", published)
		}
	})
}

func TestUnpublishedTaintsArePublishedAgainAndReportedOnce(t *testing.T) {
	var complaints journal[error]
	handle := OnError(func(_ context.Context, err error, _ string) { complaints.add(err) })
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		newer := make(chan bool)
		a.taints = func(stream grpc.ServerStreamingServer[pb.DeviceTaints]) error {
			_ = stream.Send(tainted("a", pb.TaintEffect_TAINT_EFFECT_NO_SCHEDULE))
			<-newer
			_ = stream.Send(tainted("b", pb.TaintEffect_TAINT_EFFECT_NO_SCHEDULE))
			<-stream.Context().Done()
			return nil
		}
		a.start()
		var published journal[string]
		go c.WatchTaints(ctx, func(_ context.Context, taints Taints) error {
			switch published.add(slices.Sorted(maps.Keys(taints["node-1"]))[0]) {
			case 1, 2, 4:
				return errors.New("the API server is away")
			}
			return nil
		})
		time.Sleep(2 * second) // after 0 and 1 s
		if got := published.entries(); !slices.Equal(got, []string{"a", "a"}) {
			t.Errorf("unexpected result: %v", got)
		}
		time.Sleep(time.Hour)
		if got := published.entries(); !slices.Equal(got, []string{"a", "a", "a"}) || len(complaints.entries()) != 1 {
			t.Errorf("unexpected result %v or calls of OnError %v", got, complaints.entries())
		}
		close(newer)
		time.Sleep(time.Hour)
		if got := published.entries(); !slices.Equal(got, []string{"a", "a", "a", "b", "b"}) || len(complaints.entries()) != 2 {
			t.Errorf("unexpected result %v or calls of OnError %v", got, complaints.entries())
		}
	}, handle)
}

func TestDevicesWithoutAgentArePublishedOnceWithoutTaints(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var published journal[Taints]
		go c.WatchTaints(ctx, func(_ context.Context, taints Taints) error {
			published.add(taints)
			return nil
		})
		time.Sleep(firstTaints - 1)
		if got := published.entries(); len(got) != 0 {
			t.Errorf("unexpected result: %v", got)
		}
		time.Sleep(time.Hour)
		if got := published.entries(); len(got) != 1 || got[0] != nil {
			t.Errorf("unexpected result: %v", got)
		}
	})
}

func TestTaintsOfABusyAgentAreAwaited(t *testing.T) {
	for pause, tainted := range map[time.Duration]bool{20 * second: true, time.Minute: false} {
		withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
			a.taints = func(stream grpc.ServerStreamingServer[pb.DeviceTaints]) error {
				time.Sleep(pause)
				_ = stream.Send(&pb.DeviceTaints{})
				<-stream.Context().Done()
				return nil
			}
			a.start()
			var published journal[Taints]
			go c.WatchTaints(ctx, func(_ context.Context, taints Taints) error {
				published.add(taints)
				return nil
			})
			time.Sleep(busyTaints - 1)
			if got := len(published.entries()) == 1; got != tainted {
				t.Errorf("answer after %s: published within %s: %t", pause, busyTaints, got)
			}
			time.Sleep(time.Hour)
			first := published.entries()[0]
			if (first != nil) != tainted {
				t.Errorf("answer after %s: first published: %v", pause, first)
			}
		})
	}
}

func TestTaintsStayWhileTheAgentIsAbsent(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.taints = func(stream grpc.ServerStreamingServer[pb.DeviceTaints]) error {
			_ = stream.Send(tainted("a", pb.TaintEffect_TAINT_EFFECT_NO_SCHEDULE))
			<-stream.Context().Done()
			return nil
		}
		a.start()
		number := 0
		go c.WatchTaints(ctx, func(context.Context, Taints) error {
			number++
			return nil
		})
		synctest.Wait()
		a.stop()
		time.Sleep(time.Hour)
		synctest.Wait()
		if number != 1 {
			t.Errorf("unexpected number of calls: %d", number)
		}
		a.start()
		time.Sleep(2 * second)
		synctest.Wait()
		if number != 2 {
			t.Errorf("unexpected number of calls: %d", number)
		}
	})
}

func TestTaintStreamThatKeepsEndingIsReopenedWithPauses(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.taints = func(stream grpc.ServerStreamingServer[pb.DeviceTaints]) error { return stream.Send(tainted("a")) }
		a.start()
		go c.WatchTaints(ctx, func(context.Context, Taints) error { return nil })
		time.Sleep(60 * second)
		if streams := a.count("taints"); streams > 65 {
			t.Errorf("%d streams were opened in a minute", streams)
		}
	})
}

func TestAgentWithoutTaintsIsReportedOnce(t *testing.T) {
	var complaints []error
	handle := OnError(func(_ context.Context, err error, _ string) { complaints = append(complaints, err) })
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.taints = func(grpc.ServerStreamingServer[pb.DeviceTaints]) error {
			return status.Error(codes.FailedPrecondition, "the driver's name can begin no key")
		}
		a.start()
		go c.WatchTaints(ctx, func(_ context.Context, taints Taints) error {
			if taints != nil {
				t.Errorf("unexpected taints: %v", taints)
			}
			return nil
		})
		time.Sleep(time.Hour)
		synctest.Wait()
		if len(complaints) != 1 || a.count("taints") > 130 {
			t.Errorf("unexpected calls of OnError %v, or number of streams %d", complaints, a.count("taints"))
		}
	}, handle)
}

// failedDevice answers a report with a failed device for each failed claim.
func failedDevice(_ context.Context, request *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
	reply := &pb.ReportPrepareReply{}
	for _, outcome := range request.GetOutcomes() {
		device := outcome.GetClaim().GetDevices()[0]
		reply.Answers = append(reply.Answers, &pb.ClaimAnswer{
			Uid: outcome.GetClaim().GetUid(),
			Verdict: &pb.PrepareVerdict{
				Text:       "[class=failed-device]",
				ErrorClass: pb.ErrorClass_ERROR_CLASS_FAILED_DEVICE,
				Devices:    []*pb.BlamedDevice{{Driver: driverName, Pool: device.GetPool(), Device: device.GetDevice()}},
			},
		})
	}
	return reply, nil
}

func TestTaintIsPublishedBeforeTheErrorOfAFailedDevice(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check, a.report = noBlockers, failedDevice
		a.taints = func(stream grpc.ServerStreamingServer[pb.DeviceTaints]) error {
			_ = stream.Send(tainted("dev-1", pb.TaintEffect_TAINT_EFFECT_NONE))
			time.Sleep(10 * second)
			_ = stream.Send(tainted("dev-1", pb.TaintEffect_TAINT_EFFECT_NO_SCHEDULE))
			<-stream.Context().Done()
			return nil
		}
		a.start()
		began, calls := time.Now(), 0
		go c.WatchTaints(ctx, func(context.Context, Taints) error {
			calls++
			time.Sleep(second) // the API server's time
			return nil
		})
		time.Sleep(9*second + second/2)
		results, _ := c.Prepare(ctx, claims("1"), prepares())
		expectErrors(t, results, map[string]string{"1": "[class=failed-device]"})
		if took := time.Since(began); took != 11*second || calls != 2 {
			t.Errorf("the error came after %v and %d calls of publish", took, calls)
		}
		// a device whose taint is published delays no further claim
		if _, err := c.Prepare(ctx, claims("1"), prepares()); err != nil || time.Since(began) != 11*second {
			t.Errorf("the second error came after %v", time.Since(began))
		}
	})
}

func TestMissingTaintDelaysTheErrorUpToItsLimit(t *testing.T) {
	var complaints []error
	handle := OnError(func(_ context.Context, err error, _ string) { complaints = append(complaints, err) })
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.check, a.report = noBlockers, failedDevice
		a.taints = func(stream grpc.ServerStreamingServer[pb.DeviceTaints]) error {
			<-stream.Context().Done()
			return nil
		}
		a.start()
		prepare := func(want time.Duration) {
			t.Helper()
			began := time.Now()
			results, _ := c.Prepare(ctx, claims("1"), prepares())
			expectErrors(t, results, map[string]string{"1": "[class=failed-device]"})
			if took := time.Since(began); took != want {
				t.Errorf("the error came after %v, not %v", took, want)
			}
		}
		prepare(0) // the driver publishes no taints
		go c.WatchTaints(ctx, func(context.Context, Taints) error { return nil })
		synctest.Wait()
		prepare(3 * second)
		if len(complaints) != 1 {
			t.Errorf("unexpected calls of OnError: %v", complaints)
		}
		c.Declare(cpu("dev-1"))
		prepare(3 * second)
		c.Declare(cpu("dev-2"))
		prepare(0) // an undeclared device never has a taint
		if len(complaints) != 2 {
			t.Errorf("unexpected calls of OnError: %v", complaints)
		}
	}, handle, TaintWait(3*second))
}
