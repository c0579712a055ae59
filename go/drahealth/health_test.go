// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"

	pb "drahealth.example.com/go/drahealthv1"
)

const (
	isHealthy = kubeletplugin.HealthStatusHealthy
	isUnknown = kubeletplugin.HealthStatusUnknown
	gone      = noAnswer + "there is no connection to it"
	silent    = noAnswer + "it is silent"
	second    = time.Second
)

type healthStream = grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]

func TestAgentsListsAreForwardedUnchanged(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(listOf("a", healthv1.HealthStatus_UNHEALTHY, 60, "worn out"), listOf("b", 7, 1<<50, ""))
		a.start()
		reports := make(chan kubeletplugin.DeviceHealthReport)
		go func() { _ = c.WatchHealthStatus(ctx, reports) }()
		want := kubeletplugin.DeviceHealth{
			PoolName: "node-1", DeviceName: "a", Health: kubeletplugin.HealthStatusUnhealthy, Message: "worn out",
			LastUpdated: time.Unix(1_790_000_000, 0), HealthCheckTimeout: time.Minute,
		}
		if got := (<-reports).Devices; len(got) != 1 || got[0] != want {
			t.Errorf("the result is %v, not %v", got, want)
		}
		later := (<-reports).Devices[0] // values of a later version
		if later.Health != isUnknown || later.HealthCheckTimeout != 24*time.Hour {
			t.Errorf("unexpected health %v or lease %v", later.Health, later.HealthCheckTimeout)
		}
	})
}

func TestListsOfAnsweringAgentAreNotRepeated(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendEvery(14*second, healthy("a"), healthy("a"))
		a.start()
		k := startKubelet(ctx, c)
		time.Sleep(42 * second)
		k.expect(t,
			reportedHealth{14 * second, "a", isHealthy, "", 30 * second},
			reportedHealth{28 * second, "a", isHealthy, "", 30 * second})
	})
}

func TestDeclaredDevicesAreUnknownAtOnceWithoutAgent(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		c.Declare(cpu("b"), cpu("a"), Device{Name: "of no pool"})
		k := startKubelet(ctx, c)
		k.expect(t, reportedHealth{0, "a", isUnknown, gone, 45 * second}, reportedHealth{0, "b", isUnknown, gone, 45 * second})
		time.Sleep(25 * second)
		k.expect(t,
			reportedHealth{10 * second, "a", isUnknown, gone, 45 * second}, reportedHealth{10 * second, "b", isUnknown, gone, 45 * second},
			reportedHealth{20 * second, "a", isUnknown, gone, 45 * second}, reportedHealth{20 * second, "b", isUnknown, gone, 45 * second})
		a.health = sendLists(healthy("a"))
		a.start()
		time.Sleep(2 * second)
		if got := k.received(t); len(got) != 1 || got[0].health != isHealthy {
			t.Errorf("unexpected result: %v", got)
		}
	})
}

func TestDevicesAreUnknownUntilAStoppedAgentIsBack(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		c.Declare(cpu("a"), cpu("never reported"))
		a.health = sendLists(listOf("a", healthv1.HealthStatus_HEALTHY, 9, ""))
		a.start()
		k := startKubelet(ctx, c)
		k.expect(t, reportedHealth{0, "a", isHealthy, "", 9 * second})
		time.Sleep(second)
		a.stop()
		k.expect(t,
			reportedHealth{second, "a", isUnknown, gone, 9 * second},
			reportedHealth{second, "never reported", isUnknown, gone, 45 * second})
		time.Sleep(3 * second) // a third of the smallest lease, so that none runs out
		k.expect(t,
			reportedHealth{4 * second, "a", isUnknown, gone, 9 * second},
			reportedHealth{4 * second, "never reported", isUnknown, gone, 45 * second})
		a.start()
		time.Sleep(2 * second)
		got := k.received(t)
		if len(got) != 1 || got[0].health != isHealthy || got[0].at > 6*second {
			t.Errorf("unexpected result: %v", got)
		}
	})
}

func TestKubeletsStreamSurvivesEveryEndOfTheAgents(t *testing.T) {
	ends := map[string]error{
		"it ended the stream":                    nil,
		"it does not serve health":               unimplemented(),
		"its stream failed with Internal":        status.Error(codes.Internal, "0xc000123456"),
		"there is no connection to it":           status.Error(codes.Unavailable, "10.0.0.1:80"),
		"its stream failed with InvalidArgument": status.Error(codes.InvalidArgument, "what?"),
	}
	for reason, end := range ends {
		t.Run(reason, func(t *testing.T) {
			withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
				a.health = func(stream healthStream) error {
					if err := stream.Send(healthy("a")); err != nil {
						return err
					}
					time.Sleep(second)
					return end
				}
				a.start()
				k := startKubelet(ctx, c)
				time.Sleep(second)
				k.expect(t,
					reportedHealth{0, "a", isHealthy, "", 30 * second},
					reportedHealth{second, "a", isUnknown, noAnswer + reason, 30 * second})
			})
		})
	}
}

func TestHealthStreamThatKeepsEndingIsReopenedWithPauses(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = func(stream healthStream) error { return stream.Send(healthy("a")) }
		a.start()
		startKubelet(ctx, c)
		time.Sleep(60 * second)
		if streams := a.count("health"); streams > 65 {
			t.Errorf("%d streams were opened in a minute", streams)
		}
	})
}

func TestSilentAgentCountsAsAbsentBeforeALeaseExpires(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(listOf("slow", healthv1.HealthStatus_HEALTHY, 180, ""), healthy("a"))
		a.start()
		k := startKubelet(ctx, c)
		time.Sleep(14 * second)
		k.expect(t, reportedHealth{0, "slow", isHealthy, "", 180 * second}, reportedHealth{0, "a", isHealthy, "", 30 * second})
		time.Sleep(second)
		k.expect(t, reportedHealth{15 * second, "a", isUnknown, silent, 30 * second}, reportedHealth{15 * second, "slow", isUnknown, silent, 180 * second})
	})
}

func TestDeviceMissingInListsMakesNoSilentAgent(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		slow := listOf("slow", healthv1.HealthStatus_HEALTHY, 180, "")
		a.health = func(stream healthStream) error {
			if a.count("health") == 1 {
				return stream.Send(healthy("gone"))
			}
			if err := stream.Send(slow); err != nil {
				return err
			}
			return sendEvery(60*second, slow, slow, slow)(stream)
		}
		a.start()
		k := startKubelet(ctx, c)
		time.Sleep(5 * second)
		k.received(t)
		time.Sleep(180 * second)
		for _, health := range k.received(t) {
			if health.health != isHealthy {
				t.Errorf("unexpected value: %v", health)
			}
		}
	})
}

func TestDriverWithoutDevicesHasNoSilentAgent(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists()
		a.start()
		c.Declare()
		k := startKubelet(ctx, c)
		time.Sleep(10 * time.Minute)
		k.expect(t)
		if streams := a.count("health"); streams != 1 {
			t.Errorf("the client gave up the connection %d times", streams-1)
		}
	})
}

func TestDriverThatLostItsDevicesHasNoSilentAgent(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(healthy("a"))
		a.start()
		c.Declare(cpu("a"))
		k := startKubelet(ctx, c)
		k.expect(t, reportedHealth{0, "a", isHealthy, "", 30 * second})
		c.Declare()
		time.Sleep(10 * time.Minute)
		k.expect(t)
		if streams := a.count("health"); streams != 1 {
			t.Errorf("the client gave up the connection %d times", streams-1)
		}
	})
}

func TestDriverThatLostItsDevicesStopsReportingThemAfterAnOutage(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(healthy("a"))
		a.start()
		c.Declare(cpu("a"))
		k := startKubelet(ctx, c)
		k.received(t)
		c.Declare()
		a.stop()
		if got := k.received(t); len(got) != 1 || got[0].text != gone {
			t.Errorf("the kubelet received %v", got)
		}
		a.health = sendLists()
		a.start()
		time.Sleep(30 * second)
		k.received(t)
		time.Sleep(10 * time.Minute)
		k.expect(t)
	})
}

func TestOtherLeasesOnAStreamMakeNoSilentAgent(t *testing.T) {
	for _, other := range []struct {
		name    string
		declare func(*Client)
		next    *healthv1.NodeWatchResourcesResponse
	}{
		{"the agent's configuration has a longer lease", func(*Client) {}, listOf("a", healthv1.HealthStatus_HEALTHY, 180, "")},
		{"a device with a short lease is removed", func(c *Client) { c.Declare(cpu("b")) }, listOf("b", healthv1.HealthStatus_HEALTHY, 180, "")},
	} {
		t.Run(other.name, func(t *testing.T) {
			withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
				changed := make(chan struct{})
				a.health = func(stream healthStream) error {
					if err := stream.Send(healthy("a")); err != nil {
						return err
					}
					<-changed
					if err := stream.Send(other.next); err != nil {
						return err
					}
					return sendEvery(60*second, other.next, other.next)(stream)
				}
				a.start()
				c.Declare(cpu("a"), cpu("b"))
				k := startKubelet(ctx, c)
				time.Sleep(second)
				other.declare(c)
				close(changed)
				time.Sleep(170 * second)
				for _, got := range k.received(t) {
					if got.health != isHealthy {
						t.Errorf("the kubelet received %v", got)
					}
				}
			})
		})
	}
}

func TestRepeatedListOfHungAgentIsHeldBack(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(healthy("a")) // repeated on every new stream
		a.start()
		k := startKubelet(ctx, c)
		time.Sleep(100 * second)
		got := k.received(t)
		if got[0].health != isHealthy || len(got) < 9 {
			t.Fatalf("unexpected result: %v", got)
		}
		for _, later := range got[1:] {
			if later.health != isUnknown || later.text != silent {
				t.Errorf("unexpected later list: %v", later)
			}
		}
		if streams := a.count("health"); streams < 4 {
			t.Errorf("only %d streams were tried", streams)
		}
	})
}

func TestRepeatedListInSeveralMessagesIsHeldBack(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(healthy("a"), healthy("b"))
		a.start()
		k := startKubelet(ctx, c)
		k.received(t)
		time.Sleep(100 * second)
		for _, later := range k.received(t) {
			if later.health != isUnknown {
				t.Errorf("unexpected later list: %v", later)
			}
		}
	})
}

func TestAgentAfterSilenceCountsFromItsSecondList(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = func(stream healthStream) error {
			if a.count("health") == 1 {
				return sendLists(healthy("a"))(stream)
			}
			return sendEvery(10*second, listOf("b", healthv1.HealthStatus_UNHEALTHY, 30, "broken"), healthy("a"))(stream)
		}
		a.start()
		k := startKubelet(ctx, c)
		time.Sleep(50 * second)
		got := k.received(t)
		last := got[len(got)-2:]
		if last[0].device != "b" || last[0].text != "broken" || last[1].device != "a" || last[1].health != isHealthy {
			t.Errorf("unexpected result: %v", got)
		}
		if !slices.ContainsFunc(got, func(health reportedHealth) bool { return health.text == silent }) {
			t.Errorf("unexpected result: %v", got)
		}
	})
}

func TestAgentThatAcceptsAndSendsNothingIsAbsent(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var back atomic.Bool
		c.dial = func(ctx context.Context) (net.Conn, error) {
			if back.Load() {
				return a.dial(ctx)
			}
			ours, theirs := net.Pipe()
			go func() { // reads everything, as the socket buffer of a stopped process does
				buffer := make([]byte, 1024)
				for {
					if _, err := theirs.Read(buffer); err != nil {
						return
					}
				}
			}()
			return ours, nil
		}
		c.Declare(cpu("a"))
		k := startKubelet(ctx, c)
		time.Sleep(4 * second)
		k.expect(t, reportedHealth{3 * second, "a", isUnknown, noAnswer + "no health list received yet", 45 * second})
		a.health = sendLists(healthy("a"))
		a.start()
		back.Store(true)
		time.Sleep(10 * second)
		if got := k.received(t); len(got) == 0 || got[len(got)-1].health != isHealthy {
			t.Errorf("unexpected result: %v", got)
		}
	})
}

func TestEachKubeletHasItsOwnStream(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(healthy("a"))
		a.start()
		ending, end := context.WithCancel(ctx)
		startKubelet(ending, c)
		k := startKubelet(ctx, c)
		k.expect(t, reportedHealth{0, "a", isHealthy, "", 30 * second})
		end()
		synctest.Wait()
		a.stop()
		k.expect(t, reportedHealth{0, "a", isUnknown, gone, 30 * second})
		if streams := a.count("health"); streams != 2 {
			t.Errorf("unexpected number of streams: %d", streams)
		}
	})
}

func TestHealthIsForwardedWhileDeclarationFails(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.sync = func(ctx context.Context, _ *pb.SyncDevicesRequest) error {
			<-ctx.Done()
			return ctx.Err()
		}
		a.health = func(stream healthStream) error {
			for {
				if err := stream.Send(healthy("a")); err != nil || !sleep(stream.Context(), 10*second) {
					return err
				}
			}
		}
		a.start()
		c.Declare(cpu("a"))
		first, other := startKubelet(ctx, c), startKubelet(ctx, c)
		go c.WatchTaints(ctx, func(context.Context, Taints) error { return nil })
		time.Sleep(syncTimeout + time.Millisecond)
		for _, k := range []*kubelet{first, other} {
			if got := k.received(t); len(got) == 0 || got[len(got)-1].health != isHealthy {
				t.Errorf("unexpected result: %v", got)
			}
		}
		time.Sleep(5 * time.Minute)
		for _, k := range []*kubelet{first, other} {
			if slices.ContainsFunc(k.received(t), func(health reportedHealth) bool { return health.health != isHealthy }) {
				t.Error("a refused declaration changed the health")
			}
		}
	})
}

// hostDevices is a list of the devices that the agent itself finds, which it reports until it has a declaration.
func hostDevices(names ...string) *healthv1.NodeWatchResourcesResponse {
	all := &healthv1.NodeWatchResourcesResponse{}
	for _, name := range names {
		all.Devices = append(all.Devices, healthy(name).GetDevices()...)
	}
	return all
}

// TestHostDevicesAreNotForwardedAsTheDriversOwn covers a driver whose devices have names of host devices: gpu-0 of the
// host can be another GPU.
func TestHostDevicesAreNotForwardedAsTheDriversOwn(t *testing.T) {
	for _, refusal := range []codes.Code{codes.InvalidArgument, codes.Unavailable} {
		t.Run(refusal.String(), func(t *testing.T) {
			withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
				var accepts atomic.Bool
				a.sync = func(context.Context, *pb.SyncDevicesRequest) error {
					if accepts.Load() {
						return nil
					}
					return status.Error(refusal, "refused")
				}
				a.health = sendEvery(10*second, hostDevices("gpu-0", "gpu-1", "cpu-node0"), healthy("gpu-0"), healthy("gpu-1"),
					healthy("gpu-0"))
				a.start()
				c.Declare(cpu("gpu-0"), cpu("gpu-2"))
				k := startKubelet(ctx, c)
				time.Sleep(35 * second)
				for _, got := range k.received(t) {
					if got.health != isUnknown || got.device != "gpu-0" && got.device != "gpu-2" {
						t.Errorf("without a declaration the kubelet received %v", got)
					}
				}
				accepts.Store(true)
				c.Declare(cpu("gpu-0"), cpu("gpu-2"), cpu("gpu-3"))
				time.Sleep(10 * second)
				k.expect(t, reportedHealth{40 * second, "gpu-0", isHealthy, "", 30 * second})
				a.stop()
				time.Sleep(second)
				for _, got := range k.received(t) {
					if got.device == "gpu-1" || got.device == "cpu-node0" {
						t.Errorf("without the agent the kubelet received %v", got)
					}
				}
			})
		})
	}
}

// TestFirstListOfHostDevicesIsNotForwarded covers an agent that accepts a declaration and evaluates it later.
func TestFirstListOfHostDevicesIsNotForwarded(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendEvery(10*second, hostDevices("gpu-0", "cpu-node0"), healthy("gpu-0"))
		a.start()
		c.Declare(cpu("gpu-0"))
		k := startKubelet(ctx, c)
		time.Sleep(15 * second)
		for _, got := range k.received(t) {
			if got.health != isUnknown || got.device != "gpu-0" {
				t.Errorf("before an evaluation of the declaration the kubelet received %v", got)
			}
		}
		time.Sleep(10 * second)
		k.expect(t, reportedHealth{20 * second, "gpu-0", isHealthy, "", 30 * second})
	})
}

// TestDevicesOfAnotherDeclarationAreForwarded covers an agent that keeps the former declaration because it refuses the
// new one: it reports a removed device as Unknown for a while.
func TestDevicesOfAnotherDeclarationAreForwarded(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.sync = func(context.Context, *pb.SyncDevicesRequest) error {
			return status.Error(codes.InvalidArgument, "devices[1].name: 70 bytes, limit 63")
		}
		a.health = sendLists(healthy("a"), listOf("removed", healthv1.HealthStatus_UNKNOWN, 30, "declared.gone"))
		a.start()
		c.Declare(cpu("a"), cpu("too-long"))
		startKubelet(ctx, c).expect(t, reportedHealth{0, "a", isHealthy, "", 30 * second},
			reportedHealth{0, "removed", isUnknown, "declared.gone", 30 * second})
	})
}

// TestRemovedDeviceWithTheNameOfAHostsIsNoHostDevice covers a list that the agent sends before it answers the
// declaration without the device.
func TestRemovedDeviceWithTheNameOfAHostsIsNoHostDevice(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var refuses atomic.Bool
		a.sync = func(context.Context, *pb.SyncDevicesRequest) error {
			if refuses.Load() {
				return status.Error(codes.InvalidArgument, "devices[1].name: 70 bytes, limit 63")
			}
			return nil
		}
		all := hostDevices("cpu-node0", "cpu-node1")
		a.health = sendEvery(10*second, all, all, all)
		a.start()
		c.Declare(cpu("cpu-node0"), cpu("cpu-node1"))
		k := startKubelet(ctx, c)
		time.Sleep(15 * second)
		k.received(t)
		refuses.Store(true)
		c.Declare(cpu("cpu-node0"), cpu("too-long"))
		time.Sleep(10 * second)
		if got := k.received(t); len(got) == 0 {
			t.Error("the kubelet received no health of devices that the agent still has")
		}
	})
}

func TestHostDevicesAreForwardedForADriverThatDeclaresNone(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(hostDevices("gpu-0", "cpu-node0"))
		a.start()
		startKubelet(ctx, c).expect(t,
			reportedHealth{0, "gpu-0", isHealthy, "", 30 * second}, reportedHealth{0, "cpu-node0", isHealthy, "", 30 * second})
	})
}

func TestWatchReturnsNilIfKubeletLeavesWithoutReading(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendLists(healthy("a"), healthy("a"))
		a.start()
		leaving, leave := context.WithCancel(ctx)
		ended := make(chan error)
		go func() { ended <- c.WatchHealthStatus(leaving, make(chan kubeletplugin.DeviceHealthReport)) }()
		synctest.Wait()
		leave()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func TestSlowKubeletMakesNoSilentAgent(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = sendEvery(10*second, healthy("a"), healthy("a"), healthy("a"), healthy("a"), healthy("a"), healthy("a"))
		a.start()
		reports := make(chan kubeletplugin.DeviceHealthReport)
		go func() { _ = c.WatchHealthStatus(ctx, reports) }()
		for range 3 {
			time.Sleep(20 * second)
			if got := (<-reports).Devices[0]; got.Health != isHealthy {
				t.Errorf("unexpected result: %v", got)
			}
		}
	})
}

// Tests on real sockets and the real clock, for the behaviour of the kernel.

func TestSocketWithoutListenerIsNoConnection(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	if err := listener.Close(); err != nil { // as after a kill
		t.Fatal(err)
	}
	if text := firstText(t, path); text != gone {
		t.Error(text)
	}
}

func TestServerThatIsNoAgentCountsAsAbsent(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = conn.Write([]byte("HTTP/1.1 400 Bad Request\r\n\r\n"))
			conn.Close()
		}
	}()
	if text := firstText(t, path); text != gone {
		t.Error(text)
	}
}

func firstText(t *testing.T, path string) string {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	c, err := New(driverName, Socket(path))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	c.Declare(cpu("a"))
	reports := make(chan kubeletplugin.DeviceHealthReport)
	go func() { _ = c.WatchHealthStatus(ctx, reports) }()
	text := (<-reports).Devices[0].Message
	if strings.Contains(text, path) {
		t.Errorf("%q names an address", text)
	}
	return text
}

func TestDeviceOfAnAgentThatNeverAnsweredHasTheDefaultLease(t *testing.T) {
	withFakeClock(t, func(ctx context.Context, t *testing.T, _ *fakeAgent, c *Client) {
		c.Declare(card("a"))
		k := startKubelet(ctx, c)
		time.Sleep(5 * second)
		for _, health := range k.received(t) {
			if health.lease != defaultLease { // 0 would be another lease than the agent's: a change at the kubelet
				t.Errorf("the kubelet received %v", health)
			}
		}
	})
}

func TestClientRefusesNamesThatCannotBeUsed(t *testing.T) {
	longest := strings.Repeat("d", 31) + "." + strings.Repeat("e", 31)
	for name, want := range map[string]string{
		longest:       "",
		longest + "e": fmt.Sprintf(`drahealth: driver name "%se": 64 bytes, limit 63; shorten it`, longest),
		"GPU":         `drahealth: driver name "GPU": a lowercase RFC 1123 subdomain`,
	} {
		c, err := New(name)
		if want == "" && err == nil {
			c.Close()
		} else if want == "" || err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
