package drahealth

import (
	"context"
	"net"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"

	pb "drahealth.example.com/go-driver/drahealthv1"
)

const driverName = "test.drahealth.example.com"

// fakeAgent is an agent whose answers are a test's. It is started, stopped and started again, and
// says what it was asked in which order. A method that is nil is not served: UNIMPLEMENTED.
type fakeAgent struct {
	pb.UnimplementedDriverLinkServer
	healthv1.UnimplementedDRAResourceHealthServer

	sync   func(context.Context, *pb.SyncDevicesRequest) error
	check  func(context.Context, *pb.CheckClaimsRequest) (*pb.CheckClaimsReply, error)
	report func(context.Context, *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error)
	taints func(grpc.ServerStreamingServer[pb.DeviceTaints]) error
	health func(grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]) error

	mu       sync.Mutex
	asked    []string
	listener *bufconn.Listener
	server   *grpc.Server
}

func (a *fakeAgent) start() {
	listener, server := bufconn.Listen(1<<16), grpc.NewServer()
	pb.RegisterDriverLinkServer(server, a)
	healthv1.RegisterDRAResourceHealthServer(server, a)
	go func() { _ = server.Serve(listener) }()
	a.mu.Lock()
	defer a.mu.Unlock()
	a.listener, a.server = listener, server
}

func (a *fakeAgent) stop() {
	a.mu.Lock()
	server := a.server
	a.listener, a.server = nil, nil
	a.mu.Unlock()
	if server != nil {
		server.Stop()
	}
}

func (a *fakeAgent) dial(ctx context.Context) (net.Conn, error) {
	a.mu.Lock()
	listener := a.listener
	a.mu.Unlock()
	if listener == nil {
		return nil, &net.OpError{Op: "dial", Net: "unix", Err: syscall.ECONNREFUSED}
	}
	return listener.DialContext(ctx)
}

func (a *fakeAgent) note(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.asked = append(a.asked, what)
}

func (a *fakeAgent) count(what string) (number int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, one := range a.asked {
		if one == what {
			number++
		}
	}
	return number
}

func unimplemented() error { return status.Error(codes.Unimplemented, "an older agent") }

func (a *fakeAgent) SyncDevices(ctx context.Context, request *pb.SyncDevicesRequest) (*pb.SyncDevicesReply, error) {
	a.note("sync")
	if a.sync == nil {
		return nil, unimplemented()
	}
	return &pb.SyncDevicesReply{}, a.sync(ctx, request)
}

func (a *fakeAgent) CheckClaims(ctx context.Context, request *pb.CheckClaimsRequest) (*pb.CheckClaimsReply, error) {
	a.note("check")
	if a.check == nil {
		return nil, unimplemented()
	}
	return a.check(ctx, request)
}

func (a *fakeAgent) ReportPrepare(ctx context.Context, request *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error) {
	a.note("report")
	if a.report == nil {
		return nil, unimplemented()
	}
	return a.report(ctx, request)
}

func (a *fakeAgent) WatchTaints(_ *pb.WatchTaintsRequest, stream grpc.ServerStreamingServer[pb.DeviceTaints]) error {
	a.note("taints")
	if a.taints == nil {
		return unimplemented()
	}
	return a.taints(stream)
}

func (a *fakeAgent) NodeWatchResources(
	_ *healthv1.NodeWatchResourcesRequest, stream grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse],
) error {
	a.note("health")
	if a.health == nil {
		return unimplemented()
	}
	return a.health(stream)
}

// tell is a health stream that says these lists, a pause before each, and then is silent.
func tell(lists ...*healthv1.NodeWatchResourcesResponse) func(grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]) error {
	return tellEvery(0, lists...)
}

func tellEvery(
	pause time.Duration, lists ...*healthv1.NodeWatchResourcesResponse,
) func(grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]) error {
	return func(stream grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]) error {
		for _, one := range lists {
			if !sleep(stream.Context(), pause) {
				return nil
			}
			if err := stream.Send(one); err != nil {
				return err
			}
		}
		<-stream.Context().Done()
		return nil
	}
}

func one(name string, health healthv1.HealthStatus, leaseS int64, message string) *healthv1.NodeWatchResourcesResponse {
	return &healthv1.NodeWatchResourcesResponse{Devices: []*healthv1.DeviceHealth{{
		Device:                    &healthv1.DeviceIdentifier{PoolName: "node-1", DeviceName: name},
		Health:                    health,
		LastUpdatedTime:           1_790_000_000,
		HealthCheckTimeoutSeconds: leaseS,
		Message:                   message,
	}}}
}

func healthy(name string) *healthv1.NodeWatchResourcesResponse {
	return one(name, healthv1.HealthStatus_HEALTHY, 30, "")
}

// told is one device of one report, and when it came.
type told struct {
	at     time.Duration
	device string
	health kubeletplugin.HealthStatus
	text   string
	lease  time.Duration
}

// kubelet takes reports as fast as they come.
type kubelet struct {
	mu    sync.Mutex
	heard []told
	err   error
	ended bool
}

// watches begins a stream of the driver; it ends with ctx.
func watches(ctx context.Context, c *Client) *kubelet {
	k, reports, began := &kubelet{}, make(chan kubeletplugin.DeviceHealthReport), time.Now()
	go func() {
		defer close(reports)
		err := c.WatchHealthStatus(ctx, reports)
		k.mu.Lock()
		defer k.mu.Unlock()
		k.err, k.ended = err, true
	}()
	go func() {
		for report := range reports {
			k.mu.Lock()
			for _, d := range report.Devices {
				k.heard = append(k.heard, told{time.Since(began), d.DeviceName, d.Health, d.Message, d.HealthCheckTimeout})
			}
			k.mu.Unlock()
		}
	}()
	return k
}

// said is what was heard since it was asked last.
func (k *kubelet) said(t *testing.T) []told {
	t.Helper()
	synctest.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ended {
		t.Fatalf("the stream to the kubelet ended: %v", k.err)
	}
	heard := k.heard
	k.heard = nil
	return heard
}

func (k *kubelet) expect(t *testing.T, want ...told) {
	t.Helper()
	if got := k.said(t); !slices.Equal(got, want) {
		t.Errorf("the kubelet heard\n  %v, not\n  %v", got, want)
	}
}

// inBubble runs a test on a clock of its own, with an agent that is not started, and a client of it.
// Goroutines that are left when it ends fail the test: that is synctest's doing.
func inBubble(t *testing.T, test func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client), options ...Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		a := &fakeAgent{sync: func(context.Context, *pb.SyncDevicesRequest) error { return nil }}
		c := New(driverName, append(options, func(c *Client) { c.dial = a.dial })...)
		defer a.stop()
		defer c.Close()
		defer cancel()
		test(ctx, t, a, c)
	})
}

func cpu(name string) *pb.DeclaredDevice {
	return &pb.DeclaredDevice{
		Name: name, Pool: "node-1", LeaseS: 45,
		Part: &pb.DeclaredDevice_Cpus{Cpus: &pb.CpusPart{Cpus: "0"}},
	}
}
