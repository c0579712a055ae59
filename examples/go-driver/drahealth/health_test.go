package drahealth

import (
	"context"
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

	pb "drahealth.example.com/go-driver/drahealthv1"
)

const (
	isHealthy = kubeletplugin.HealthStatusHealthy
	isUnknown = kubeletplugin.HealthStatusUnknown
	gone      = noAnswer + "there is no connection to it"
	silent    = noAnswer + "it is silent"
	second    = time.Second
)

type healthStream = grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]

func TestWhatTheAgentSaysGoesOutAsItIs(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tell(one("a", healthv1.HealthStatus_UNHEALTHY, 60, "worn out"), one("b", 7, 1<<50, ""))
		a.start()
		reports := make(chan kubeletplugin.DeviceHealthReport)
		go func() { _ = c.WatchHealthStatus(ctx, reports) }()
		want := kubeletplugin.DeviceHealth{
			PoolName: "node-1", DeviceName: "a", Health: kubeletplugin.HealthStatusUnhealthy, Message: "worn out",
			LastUpdated: time.Unix(1_790_000_000, 0), HealthCheckTimeout: time.Minute,
		}
		if got := (<-reports).Devices; len(got) != 1 || got[0] != want {
			t.Errorf("%v, not %v", got, want)
		}
		later := (<-reports).Devices[0] // of a version to come
		if later.Health != isUnknown || later.HealthCheckTimeout != 24*time.Hour {
			t.Errorf("health %v for %v", later.Health, later.HealthCheckTimeout)
		}
	})
}

func TestNothingIsRepeatedForAnAgentThatAnswers(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tellEvery(14*second, healthy("a"), healthy("a"))
		a.start()
		k := watches(ctx, c)
		time.Sleep(42 * second)
		k.expect(t,
			told{14 * second, "a", isHealthy, "", 30 * second},
			told{28 * second, "a", isHealthy, "", 30 * second})
	})
}

func TestAnAgentThatIsAwayAtTheStartLeavesDeclaredDevicesUnknownAtOnce(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		c.Declare(cpu("b"), cpu("a"), &pb.DeclaredDevice{Name: "of no pool"})
		k := watches(ctx, c)
		k.expect(t, told{0, "a", isUnknown, gone, 45 * second}, told{0, "b", isUnknown, gone, 45 * second})
		time.Sleep(25 * second)
		k.expect(t,
			told{10 * second, "a", isUnknown, gone, 45 * second}, told{10 * second, "b", isUnknown, gone, 45 * second},
			told{20 * second, "a", isUnknown, gone, 45 * second}, told{20 * second, "b", isUnknown, gone, 45 * second})
		a.health = tell(healthy("a"))
		a.start()
		time.Sleep(2 * second)
		if heard := k.said(t); len(heard) != 1 || heard[0].health != isHealthy {
			t.Errorf("%v", heard)
		}
	})
}

func TestAnAgentThatEndsLeavesDevicesUnknownAtOnceUntilItIsBack(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		c.Declare(cpu("a"), cpu("never told of"))
		a.health = tell(one("a", healthv1.HealthStatus_HEALTHY, 9, ""))
		a.start()
		k := watches(ctx, c)
		k.expect(t, told{0, "a", isHealthy, "", 9 * second})
		time.Sleep(second)
		a.stop()
		k.expect(t,
			told{second, "a", isUnknown, gone, 9 * second},
			told{second, "never told of", isUnknown, gone, 45 * second})
		time.Sleep(3 * second) // a third of the smallest lease, so that none runs out
		k.expect(t,
			told{4 * second, "a", isUnknown, gone, 9 * second},
			told{4 * second, "never told of", isUnknown, gone, 45 * second})
		a.start()
		time.Sleep(2 * second)
		heard := k.said(t)
		if len(heard) != 1 || heard[0].health != isHealthy || heard[0].at > 6*second {
			t.Errorf("%v", heard)
		}
	})
}

func TestWhateverEndsTheAgentsStreamNeverEndsTheKubelets(t *testing.T) {
	ends := map[string]error{
		"it ended the stream":                    nil,
		"it does not serve health":               unimplemented(),
		"its stream failed with Internal":        status.Error(codes.Internal, "0xc000123456"),
		"there is no connection to it":           status.Error(codes.Unavailable, "10.0.0.1:80"),
		"its stream failed with InvalidArgument": status.Error(codes.InvalidArgument, "what?"),
	}
	for reason, end := range ends {
		t.Run(reason, func(t *testing.T) {
			inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
				a.health = func(stream healthStream) error {
					if err := stream.Send(healthy("a")); err != nil {
						return err
					}
					time.Sleep(second)
					return end
				}
				a.start()
				k := watches(ctx, c)
				time.Sleep(second)
				k.expect(t,
					told{0, "a", isHealthy, "", 30 * second},
					told{second, "a", isUnknown, noAnswer + reason, 30 * second})
			})
		})
	}
}

func TestAnAgentThatKeepsEndingIsNotAskedAllTheTime(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = func(stream healthStream) error { return stream.Send(healthy("a")) }
		a.start()
		watches(ctx, c)
		time.Sleep(60 * second)
		if streams := a.count("health"); streams > 65 {
			t.Errorf("%d streams in a minute", streams)
		}
	})
}

func TestASilentAgentIsAwayBeforeAnyLeaseEnds(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tell(one("slow", healthv1.HealthStatus_HEALTHY, 180, ""), healthy("a"))
		a.start()
		k := watches(ctx, c)
		time.Sleep(14 * second)
		k.expect(t, told{0, "slow", isHealthy, "", 180 * second}, told{0, "a", isHealthy, "", 30 * second})
		time.Sleep(second)
		k.expect(t, told{15 * second, "a", isUnknown, silent, 30 * second}, told{15 * second, "slow", isUnknown, silent, 180 * second})
	})
}

func TestADeviceThatIsNoLongerToldOfMakesNoSilentAgent(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		slow := one("slow", healthv1.HealthStatus_HEALTHY, 180, "")
		a.health = func(stream healthStream) error {
			if a.count("health") == 1 {
				return stream.Send(healthy("gone"))
			}
			if err := stream.Send(slow); err != nil {
				return err
			}
			return tellEvery(60*second, slow, slow, slow)(stream)
		}
		a.start()
		k := watches(ctx, c)
		time.Sleep(5 * second)
		k.said(t)
		time.Sleep(180 * second)
		for _, one := range k.said(t) {
			if one.health != isHealthy {
				t.Errorf("%v", one)
			}
		}
	})
}

func TestADriverWithoutDevicesHasNoSilentAgent(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tell()
		a.start()
		c.Declare()
		k := watches(ctx, c)
		time.Sleep(10 * time.Minute)
		k.expect(t)
		if streams := a.count("health"); streams != 1 {
			t.Errorf("the connection was given up %d times", streams-1)
		}
	})
}

func TestADriverThatHasLostItsDevicesHasNoSilentAgent(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tell(healthy("a"))
		a.start()
		c.Declare(cpu("a"))
		k := watches(ctx, c)
		k.expect(t, told{0, "a", isHealthy, "", 30 * second})
		c.Declare()
		time.Sleep(10 * time.Minute)
		k.expect(t)
		if streams := a.count("health"); streams != 1 {
			t.Errorf("the connection was given up %d times", streams-1)
		}
	})
}

func TestTheLastListOfAnAgentThatHangsIsNoNews(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tell(healthy("a")) // and again to every new stream
		a.start()
		k := watches(ctx, c)
		time.Sleep(100 * second)
		heard := k.said(t)
		if heard[0].health != isHealthy || len(heard) < 9 {
			t.Fatalf("%v", heard)
		}
		for _, later := range heard[1:] {
			if later.health != isUnknown || later.text != silent {
				t.Errorf("%v", later)
			}
		}
		if streams := a.count("health"); streams < 4 {
			t.Errorf("only %d streams were tried", streams)
		}
	})
}

func TestTheLastListInSeveralMessagesIsNoNewsEither(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tell(healthy("a"), healthy("b"))
		a.start()
		k := watches(ctx, c)
		k.said(t)
		time.Sleep(100 * second)
		for _, later := range k.said(t) {
			if later.health != isUnknown {
				t.Errorf("%v", later)
			}
		}
	})
}

func TestAnAgentThatSpeaksAgainIsBelievedWithItsSecondMessage(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = func(stream healthStream) error {
			if a.count("health") == 1 {
				return tell(healthy("a"))(stream)
			}
			return tellEvery(10*second, one("b", healthv1.HealthStatus_UNHEALTHY, 30, "broken"), healthy("a"))(stream)
		}
		a.start()
		k := watches(ctx, c)
		time.Sleep(50 * second)
		heard := k.said(t)
		last := heard[len(heard)-2:]
		if last[0].device != "b" || last[0].text != "broken" || last[1].device != "a" || last[1].health != isHealthy {
			t.Errorf("%v", heard)
		}
		if !slices.ContainsFunc(heard, func(one told) bool { return one.text == silent }) {
			t.Errorf("%v", heard)
		}
	})
}

func TestAnAgentThatAcceptsAndSaysNothingIsAway(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		var back atomic.Bool
		c.dial = func(ctx context.Context) (net.Conn, error) {
			if back.Load() {
				return a.dial(ctx)
			}
			ours, theirs := net.Pipe()
			go func() { // takes all, as a socket's buffer does for a process that was stopped
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
		k := watches(ctx, c)
		time.Sleep(4 * second)
		k.expect(t, told{3 * second, "a", isUnknown, noAnswer + "nothing came from it yet", 45 * second})
		a.health = tell(healthy("a"))
		a.start()
		back.Store(true)
		time.Sleep(10 * second)
		if heard := k.said(t); len(heard) == 0 || heard[len(heard)-1].health != isHealthy {
			t.Errorf("%v", heard)
		}
	})
}

func TestEachKubeletHasAStreamOfItsOwn(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tell(healthy("a"))
		a.start()
		ending, end := context.WithCancel(ctx)
		watches(ending, c)
		k := watches(ctx, c)
		k.expect(t, told{0, "a", isHealthy, "", 30 * second})
		end()
		synctest.Wait()
		a.stop()
		k.expect(t, told{0, "a", isUnknown, gone, 30 * second})
		if streams := a.count("health"); streams != 2 {
			t.Errorf("%d streams", streams)
		}
	})
}

func TestHealthFlowsWhileDevicesCannotBeDeclared(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
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
		one, other := watches(ctx, c), watches(ctx, c)
		go c.WatchTaints(ctx, func(Taints) {})
		time.Sleep(syncTimeout + time.Millisecond)
		for _, k := range []*kubelet{one, other} {
			if heard := k.said(t); len(heard) == 0 || heard[len(heard)-1].health != isHealthy {
				t.Errorf("%v", heard)
			}
		}
		time.Sleep(5 * time.Minute)
		for _, k := range []*kubelet{one, other} {
			if slices.ContainsFunc(k.said(t), func(one told) bool { return one.health != isHealthy }) {
				t.Error("health is not well for that")
			}
		}
	})
}

func TestItEndsWithNilWhenTheKubeletLeavesWithoutTakingAnything(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tell(healthy("a"), healthy("a"))
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

func TestASlowKubeletMakesNoSilentAgent(t *testing.T) {
	inBubble(t, func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client) {
		a.health = tellEvery(10*second, healthy("a"), healthy("a"), healthy("a"), healthy("a"), healthy("a"), healthy("a"))
		a.start()
		reports := make(chan kubeletplugin.DeviceHealthReport)
		go func() { _ = c.WatchHealthStatus(ctx, reports) }()
		for range 3 {
			time.Sleep(20 * second)
			if got := (<-reports).Devices[0]; got.Health != isHealthy {
				t.Errorf("%v", got)
			}
		}
	})
}

// On real sockets, and on the real clock: what a kernel does of its own.

func TestASocketThatNobodyListensOnIsNoConnection(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	listener.SetUnlinkOnClose(false)
	if err := listener.Close(); err != nil { // as of a process that was killed
		t.Fatal(err)
	}
	if text := firstText(t, path); text != gone {
		t.Error(text)
	}
}

func TestAServerThatIsNoAgentIsAway(t *testing.T) {
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
	c := New(driverName, Socket(path))
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
