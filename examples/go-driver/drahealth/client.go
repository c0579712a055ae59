// Package drahealth is how a DRA driver gets its devices' health, and judged errors, from the
// drahealth agent of its node. It is there to be copied: with drahealthv1, and the import path of
// that changed, it is whole.
//
//	agent := drahealth.New("gpu.example.com", drahealth.Version("v1.2.3"))
//	agent.Declare(devices...)        // what the driver's devices are made of
//	agent.WatchHealthStatus(...)     // the body of the driver's method of that name
//	agent.Prepare(..., d.prepare)    // likewise; the driver writes what is done for one claim
//	agent.Unprepare(..., d.unprepare)
//	agent.WatchTaints(...)           // what its ResourceSlices should say
//
// A driver never depends on the agent. While it is away, hung, or of another version, claims are
// prepared as if nobody had ever asked, and devices are Unknown: at once, and never Healthy for
// having been so before.
package drahealth

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"drahealth.example.com/go-driver/drahealthv1"
)

const (
	// runtimeDir is where the agent has its sockets, unless it was told otherwise.
	runtimeDir = "/run/drahealth"
	// reconnectMax is how long a connection is left alone that could not be made.
	reconnectMax = time.Second
	// connectTimeout is for what accepts a connection and then says nothing, as a stopped process
	// does.
	connectTimeout = 5 * time.Second
	// doubtTime is for how long nobody waits for an agent that did not answer in time.
	doubtTime = 10 * time.Second
	// retryMin and retryMax are how long it takes to the next try after a stream has ended.
	retryMin = 100 * time.Millisecond
	retryMax = time.Second
	// steady is how long a stream has lived whose end was no sign that the next one ends, too.
	steady = 10 * time.Second
)

// Client is a driver's connection to the agent, made when it is first needed and again whenever it is
// lost. All methods may be called by several goroutines.
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

	declared    atomic.Pointer[declaration]
	declareOnce sync.Once
	undeclared  chan struct{} // holds one: there is something to declare
	syncing     chan struct{} // holds one while somebody declares
	reports     reports

	mu       sync.Mutex
	closed   bool
	dialed   net.Conn  // what the connection runs over
	doubtful time.Time // until then the agent is taken not to answer
}

// Option is a setting of a Client.
type Option func(*Client)

// Socket is where the agent listens for this driver. Default: /run/drahealth/drivers/<driver>.sock.
func Socket(path string) Option { return func(c *Client) { c.socket = path } }

// Version is the driver's own. What is remembered of a claim that failed is forgotten with a new
// version.
func Version(version string) Option { return func(c *Client) { c.version = version } }

// OnError gets what a person should know: that the agent refuses the driver's devices, for instance,
// but not that it is away. All of it is kubeletplugin.ErrRecoverable, so a driver's HandleError fits.
// Default: a line in the log.
func OnError(handle func(ctx context.Context, err error, msg string)) Option {
	return func(c *Client) { c.onError = handle }
}

// New makes a client. It does not connect yet, and never waits for the agent.
func New(driver string, options ...Option) *Client {
	c := &Client{
		driver:     driver,
		socket:     filepath.Join(runtimeDir, "drivers", driver+".sock"),
		onError:    func(ctx context.Context, err error, msg string) { klog.FromContext(ctx).Error(err, msg) },
		undeclared: make(chan struct{}, 1),
		syncing:    make(chan struct{}, 1),
	}
	c.dial = func(ctx context.Context) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", c.socket)
	}
	for _, option := range options {
		option(c)
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
		panic(err) // these very options cannot be had together: a mistake in this file
	}
	c.conn = conn
	c.link = drahealthv1.NewDriverLinkClient(conn)
	return c
}

// Close ends everything that the client does in the background, and waits for it. Questions to the
// agent that are under way end; WatchHealthStatus says Unknown until its ctx is done.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.cancel()
	_ = c.conn.Close() // it says only that it was closed before
	c.running.Wait()
}

// inBackground runs what ends with c.background. After Close nothing is begun any more.
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

// disconnect gives up a connection behind which nobody answers: another process may be listening by
// now.
func (c *Client) disconnect() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.dialed != nil {
		_ = c.dialed.Close() // grpc notices, and connects anew
	}
}

// absent says that to wait for the agent would be in vain.
func (c *Client) absent() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.closed || time.Now().Before(c.doubtful) || c.conn.GetState() == connectivity.TransientFailure
}

// doubt notes that the agent did not answer; for a while nobody waits for it, unless it does in
// between. No time at all ends the doubt.
func (c *Client) doubt(pause time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.doubtful = time.Now().Add(pause)
}

// complain tells a person of what the driver can do without.
func (c *Client) complain(ctx context.Context, err error, msg string) {
	c.onError(ctx, fmt.Errorf("%w (%w)", err, kubeletplugin.ErrRecoverable), msg)
}

// sleep is over early when ctx is done; it says whether it was not.
func sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(pause):
		return true
	}
}
