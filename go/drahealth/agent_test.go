// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

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

	pb "drahealth.example.com/go/drahealthv1"
)

const driverName = "test.drahealth.example.com"

// fakeAgent is an agent whose answers a test sets. It can be started and stopped repeatedly, and records
// the calls in order. A method whose function is nil returns UNIMPLEMENTED.
type fakeAgent struct {
	pb.UnimplementedDriverLinkServer
	healthv1.UnimplementedDRAResourceHealthServer

	sync     func(context.Context, *pb.SyncDevicesRequest) error
	check    func(context.Context, *pb.CheckClaimsRequest) (*pb.CheckClaimsReply, error)
	checks   func(context.Context, *pb.ReportChecksRequest) error
	classify func(context.Context, *pb.ClassifyRequest) (*pb.ClassifyReply, error)
	report   func(context.Context, *pb.ReportPrepareRequest) (*pb.ReportPrepareReply, error)
	taints   func(grpc.ServerStreamingServer[pb.DeviceTaints]) error
	health   func(grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]) error

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
	for _, call := range a.asked {
		if call == what {
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

func (a *fakeAgent) ReportChecks(ctx context.Context, request *pb.ReportChecksRequest) (*pb.ReportChecksReply, error) {
	a.note("checks")
	if a.checks == nil {
		return nil, unimplemented()
	}
	return &pb.ReportChecksReply{}, a.checks(ctx, request)
}

func (a *fakeAgent) Classify(ctx context.Context, request *pb.ClassifyRequest) (*pb.ClassifyReply, error) {
	a.note("classify")
	if a.classify == nil {
		return nil, unimplemented()
	}
	return a.classify(ctx, request)
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

// sendLists returns a health stream that sends the lists and then nothing; sendEvery pauses before each.
func sendLists(lists ...*healthv1.NodeWatchResourcesResponse) func(grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]) error {
	return sendEvery(0, lists...)
}

func sendEvery(
	pause time.Duration, lists ...*healthv1.NodeWatchResourcesResponse,
) func(grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]) error {
	return func(stream grpc.ServerStreamingServer[healthv1.NodeWatchResourcesResponse]) error {
		for _, list := range lists {
			if !sleep(stream.Context(), pause) {
				return nil
			}
			if err := stream.Send(list); err != nil {
				return err
			}
		}
		<-stream.Context().Done()
		return nil
	}
}

func listOf(name string, health healthv1.HealthStatus, leaseS int64, message string) *healthv1.NodeWatchResourcesResponse {
	return &healthv1.NodeWatchResourcesResponse{Devices: []*healthv1.DeviceHealth{{
		Device:                    &healthv1.DeviceIdentifier{PoolName: "node-1", DeviceName: name},
		Health:                    health,
		LastUpdatedTime:           1_790_000_000,
		HealthCheckTimeoutSeconds: leaseS,
		Message:                   message,
	}}}
}

func healthy(name string) *healthv1.NodeWatchResourcesResponse {
	return listOf(name, healthv1.HealthStatus_HEALTHY, 30, "")
}

// reportedHealth is one device of a report to the kubelet, with the time of the report.
type reportedHealth struct {
	at     time.Duration
	device string
	health kubeletplugin.HealthStatus
	text   string
	lease  time.Duration
}

// kubelet receives reports without delay.
type kubelet struct {
	mu      sync.Mutex
	reports []reportedHealth
	err     error
	ended   bool
}

// startKubelet opens a health stream of the driver that ends with ctx.
func startKubelet(ctx context.Context, c *Client) *kubelet {
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
				k.reports = append(k.reports, reportedHealth{time.Since(began), d.DeviceName, d.Health, d.Message, d.HealthCheckTimeout})
			}
			k.mu.Unlock()
		}
	}()
	return k
}

// received returns the reports since the last call.
func (k *kubelet) received(t *testing.T) []reportedHealth {
	t.Helper()
	synctest.Wait()
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.ended {
		t.Fatalf("the stream to the kubelet ended: %v", k.err)
	}
	reports := k.reports
	k.reports = nil
	return reports
}

func (k *kubelet) expect(t *testing.T, want ...reportedHealth) {
	t.Helper()
	if got := k.received(t); !slices.Equal(got, want) {
		t.Errorf("the kubelet received\n  %v, not\n  %v", got, want)
	}
}

// withFakeClock runs a test on a fake clock, with an agent that is not started and its client. synctest fails
// the test if goroutines are left at its end.
func withFakeClock(t *testing.T, test func(ctx context.Context, t *testing.T, a *fakeAgent, c *Client), options ...Option) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		a := &fakeAgent{sync: func(context.Context, *pb.SyncDevicesRequest) error { return nil }}
		c, err := New(driverName, append(options, func(c *Client) { c.dial = a.dial })...)
		if err != nil {
			t.Fatal(err)
		}
		defer a.stop()
		defer c.Close()
		defer cancel()
		test(ctx, t, a, c)
	})
}

func cpu(name string) Device {
	return Device{Name: name, Pool: "node-1", Lease: 45 * time.Second, Part: CPUs{List: "0"}}
}

// journal records what goroutines did, for a test that reads it while they run.
type journal[T any] struct {
	mu  sync.Mutex
	all []T
}

// add appends one entry and returns the number of entries.
func (j *journal[T]) add(entry T) int {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.all = append(j.all, entry)
	return len(j.all)
}

// entries waits until all goroutines are blocked, and returns what they did.
func (j *journal[T]) entries() []T {
	synctest.Wait()
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.all)
}
