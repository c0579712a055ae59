package drahealth

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"drahealth.example.com/go-driver/drahealthv1"
)

const (
	// syncTimeout is for a call that is answered within two seconds, or by a disk that hangs. Nobody
	// waits for longer: health is told without it, too.
	syncTimeout = 5 * time.Second
	// declareMax is how long an agent is left alone to which the devices could not be declared.
	declareMax = 30 * time.Second
)

// declaration is what was said in one call of Declare. What is noted in it belongs to whoever syncs.
type declaration struct {
	devices []*drahealthv1.DeclaredDevice
	told    bool // OnError has heard why the agent does not take it
	refused bool // it never will
}

// Declare says what the driver's devices are: all of them, each time. The agent judges them from then
// on, and is told again whenever there is a new connection to it. Devices must not be changed
// afterwards.
//
// Name the pool of each: to the agent an empty one is the node's name, but of a device without one
// nobody can say that it is Unknown while the agent is away. A driver that writes devices.d instead
// does not call this.
//
// It returns at once. An agent that refuses them is told of by OnError, once; what cannot be right
// later is not declared again until the next call. One that is too old to be told is left in peace.
func (c *Client) Declare(devices ...*drahealthv1.DeclaredDevice) {
	c.declared.Store(&declaration{devices: devices})
	c.declareSoon()
	c.declareOnce.Do(func() { c.inBackground(c.keepDeclared) })
}

func (c *Client) declareSoon() {
	select {
	case c.undeclared <- struct{}{}:
	default: // somebody is about to
	}
}

// keepDeclared declares what could not be declared when it should have been.
func (c *Client) keepDeclared() {
	for {
		select {
		case <-c.background.Done():
			return
		case <-c.undeclared:
		}
		for pause := reconnectMax; c.sync(c.background) != nil; pause = min(2*pause, declareMax) {
			select {
			case <-c.background.Done():
				return
			case <-c.undeclared: // there are others now, or another connection
			case <-time.After(pause):
			}
		}
	}
}

// sync declares the devices if there are any, and it could help. An error says that trying again
// could help, too.
func (c *Client) sync(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	select {
	case c.syncing <- struct{}{}:
		defer func() { <-c.syncing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	said := c.declared.Load()
	if said == nil || said.refused {
		return nil
	}
	_, err := c.link.SyncDevices(ctx, &drahealthv1.SyncDevicesRequest{Devices: said.devices})
	switch status.Code(err) {
	case codes.OK:
		c.doubt(0)
		return nil
	case codes.Unimplemented:
		return nil
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return err // it is away: the health stream says so
	case codes.InvalidArgument:
		said.refused = true
	}
	if !said.told {
		said.told = true
		c.complain(ctx, err, "the drahealth agent does not take the driver's devices")
	}
	return err
}
