// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

// Package drahealth gets the health of a DRA driver's devices and classified errors from the drahealth
// agent of the node. It needs a driver with the kubeletplugin helper 0.37 or later
// (k8s.io/dynamic-resource-allocation/kubeletplugin), and an agent that runs with --driver for it.
//
//	agent, err := drahealth.New("gpu.example.com", drahealth.Version("v1.2.3"))
//	agent.Check(check)               // a check of the driver's own, run periodically on its devices
//	agent.Declare(devices...)        // the driver's devices, and the hardware behind them
//	agent.Recheck("")                // run the checks now, for example after a reset
//	agent.WatchHealthStatus(...)     // the body of the driver's method of that name
//	agent.Prepare(..., d.prepare)    // the body of PrepareResourceClaims; d.prepare prepares one claim
//	agent.Unprepare(..., d.unprepare)
//	agent.KubeClient(client)         // for kubeletplugin.KubeClient: errors of fetching claims have a class too
//	agent.WatchTaints(...)           // the taints for the ResourceSlices
//
// A driver does not depend on the agent. While the agent is stopped, hung, or of an incompatible
// version, claims are prepared without it and all devices become Unknown at once.
//
// # What blocks
//
// Prepare and Unprepare wait for the agent for at most 500 ms in one call of the kubelet, StartPrepare and
// Report together as well, and a failed fetch of KubeClient's claims and Close too. They do not wait at all while
// the agent is known to be absent. Prepare and Report wait longer only for the taint of a device that failed, see
// TaintWait. WatchHealthStatus and WatchTaints block until their context is done. Close waits for the client's
// goroutines, and for 500 ms for a check that ignores its context. All other functions return at once.
//
// # Errors
//
// The agent classifies an error by what it wraps: errno and file, gRPC or API server status, timeouts,
// marks of this package. An error that was formatted with %v is text only: audit the driver's error paths
// for %v and %s, and use %w. Evidence shows what the agent gets.
package drahealth

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"drahealth.example.com/go/drahealthv1"
)

const (
	// runtimeDir is the default directory of the agent's sockets.
	runtimeDir = "/run/drahealth"
	// driverMax is Kubernetes' limit of a driver's name [bytes].
	driverMax = 63
	// socketMax is the kernel's limit of a socket's path [bytes].
	socketMax = 107
	// reconnectMax is the longest pause before the next attempt to connect.
	reconnectMax = time.Second
	// connectTimeout limits a connection attempt: a stopped process accepts connections and sends
	// nothing.
	connectTimeout = 5 * time.Second
	// doubtTime is how long calls do not wait for an agent that did not answer in time.
	doubtTime = 10 * time.Second
	// retryMin and retryMax limit the pause before a stream that has ended is opened again.
	retryMin = 100 * time.Millisecond
	retryMax = time.Second
	// steady is the duration of a stream after which the pause before the next one is retryMin again.
	steady = 10 * time.Second
)

// Client is a driver's connection to the agent. It connects when needed and reconnects after a loss.
// All methods are safe for concurrent use.
type Client struct {
	driver  string
	version string
	socket  string
	onError func(ctx context.Context, err error, msg string)
	dial    func(ctx context.Context) (net.Conn, error)

	conn *grpc.ClientConn
	link drahealthv1.DriverLinkClient

	background context.Context // done when the client is closed
	cancel     context.CancelFunc
	running    sync.WaitGroup

	checks      *checks
	declared    atomic.Pointer[declaration]
	declareOnce sync.Once
	reopened    atomic.Pointer[time.Time]
	undeclared  chan struct{} // capacity 1; full: devices are to be declared
	syncing     chan struct{} // capacity 1; full: a declaration is in progress
	reports     reports
	published   published
	taintWait   time.Duration

	mu       sync.Mutex
	closed   bool
	dialed   net.Conn  // the transport of conn
	doubtful time.Time // until then the agent counts as absent
}

// Option is a setting of a Client.
type Option func(*Client)

// Socket sets the path of the agent's socket for this driver. Default, also of an empty path:
// /run/drahealth/drivers/<driver>.sock.
func Socket(path string) Option { return func(c *Client) { c.socket = path } }

// Version sets the version of the driver. With a new version the agent forgets remembered failures.
func Version(version string) Option { return func(c *Client) { c.version = version } }

// OnError sets the function that gets errors for the operator, such as a refused declaration, but not
// an absent agent. All errors are kubeletplugin.ErrRecoverable, so that the driver's HandleError can be
// used. It must not call Close, which waits for it. Default, also of nil: log the error.
func OnError(handle func(ctx context.Context, err error, msg string)) Option {
	return func(c *Client) { c.onError = handle }
}

// New returns a client for a driver, named as in its ResourceSlices. It does not connect and never blocks.
// It fails if the name or the path of the socket cannot be used.
func New(driver string, options ...Option) (*Client, error) {
	if len(driver) > driverMax {
		return nil, fmt.Errorf("drahealth: driver name %q: %d bytes, limit %d; shorten it", driver, len(driver), driverMax)
	}
	if wrong := validation.IsDNS1123Subdomain(driver); len(wrong) > 0 {
		return nil, fmt.Errorf("drahealth: driver name %q: %s", driver, wrong[0])
	}
	c := &Client{
		driver:     driver,
		undeclared: make(chan struct{}, 1),
		syncing:    make(chan struct{}, 1),
		taintWait:  taintWait,
		checks:     newChecks(),
	}
	c.dial = func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", c.socket)
	}
	for _, option := range options {
		option(c)
	}
	c.socket = cmp.Or(c.socket, filepath.Join(runtimeDir, "drivers", driver+".sock"))
	if c.onError == nil {
		c.onError = func(ctx context.Context, err error, msg string) { klog.FromContext(ctx).Error(err, msg) }
	}
	if len(c.socket) > socketMax {
		return nil, fmt.Errorf("drahealth: socket path %q: %d bytes, limit %d", c.socket, len(c.socket), socketMax)
	}
	c.background, c.cancel = context.WithCancel(context.Background())
	conn, err := grpc.NewClient("passthrough:///drahealth",
		grpc.WithContextDialer(c.connect),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 2, MaxDelay: reconnectMax},
			MinConnectTimeout: connectTimeout,
		}),
		grpc.WithDisableServiceConfig(),
	)
	if err != nil {
		return nil, fmt.Errorf("drahealth: gRPC client: %w", err)
	}
	c.conn = conn
	c.link = drahealthv1.NewDriverLinkClient(conn)
	return c, nil
}

// Close stops the client's goroutines and waits for them. Reports that are not delivered yet get 500 ms, unless the
// agent is known to be absent; all other calls of the agent are aborted. The contexts of checks that run are
// cancelled, and the checks get 500 ms to return. WatchHealthStatus reports Unknown until its ctx is done. A second
// call does nothing.
func (c *Client) Close() error {
	if !c.absent() {
		c.reports.wait(budget)
	}
	c.mu.Lock()
	closed := c.closed
	c.closed = true
	c.mu.Unlock()
	if closed {
		return nil
	}
	c.cancel()
	err := c.conn.Close()
	c.running.Wait()
	return err
}

// inBackground starts a goroutine that must end with c.background; after Close it starts none.
func (c *Client) inBackground(run func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.closed {
		c.running.Go(run)
	}
}

func (c *Client) connect(ctx context.Context, _ string) (net.Conn, error) {
	conn, err := c.dial(ctx)
	if err == nil {
		c.mu.Lock()
		c.dialed = conn
		c.mu.Unlock()
	}
	return conn, err
}

// disconnect closes a connection whose peer does not answer; a new agent may listen on the socket.
func (c *Client) disconnect() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dialed != nil {
		_ = c.dialed.Close() // grpc reconnects
	}
}

// absent reports whether the agent is known not to answer, so that waiting for it is useless.
func (c *Client) absent() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed || time.Now().Before(c.doubtful) || c.conn.GetState() == connectivity.TransientFailure
}

// doubt makes the agent count as absent for a while, because it did not answer. A pause of 0 ends that.
func (c *Client) doubt(pause time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.doubtful = time.Now().Add(pause)
}

// noteAnswer notes whether the agent answered a call with the deadline budget; ctx is the kubelet's.
func (c *Client) noteAnswer(ctx context.Context, err error) {
	switch code := status.Code(err); {
	case code == codes.OK:
		c.doubt(0)
	case code == codes.Unavailable:
		c.doubt(reconnectMax) // the connection's state changes a moment later
	case code == codes.DeadlineExceeded && ctx.Err() == nil:
		c.doubt(doubtTime)
	}
}

// complain passes a recoverable error to OnError.
func (c *Client) complain(ctx context.Context, err error, msg string) {
	c.onError(ctx, fmt.Errorf("%w (%w)", err, kubeletplugin.ErrRecoverable), msg)
}

// fill fills a channel of capacity 1, unless it is full already.
func fill(channel chan<- struct{}) {
	select {
	case channel <- struct{}{}:
	default:
	}
}

// sleep pauses, or returns false as soon as ctx is done.
func sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}
