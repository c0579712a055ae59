package drahealth

import (
	"context"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"drahealth.example.com/go/drahealthv1"
)

const (
	// syncTimeout limits a declaration, which takes up to two seconds, or longer with a hung disk.
	// Health streams do not depend on the declaration.
	syncTimeout = 5 * time.Second
	// declareMax is the longest pause before a failed declaration is repeated.
	declareMax = 30 * time.Second
)

// declaration has the devices of one call of Declare. Only sync changes the other fields.
type declaration struct {
	devices  []*drahealthv1.DeclaredDevice
	reported bool // OnError got the agent's error
	refused  bool // the agent will never accept it
}

// Declare sets all devices of the driver, which the agent evaluates from then on. They are declared
// again on each new connection. The devices must not be changed afterwards.
//
// Set the pool of each device: for the agent an empty pool is the node's name, but while the agent is
// absent a device without a pool cannot be reported as Unknown. A driver that writes devices.d does not
// call Declare.
//
// Declare returns at once. OnError gets the agent's refusal once; invalid devices are not declared again
// until the next call. An agent that is too old for declarations is not an error.
func (c *Client) Declare(devices ...*drahealthv1.DeclaredDevice) {
	c.declared.Store(&declaration{devices: devices})
	c.declareSoon()
	c.declareOnce.Do(func() { c.inBackground(c.keepDeclared) })
}

func (c *Client) declareSoon() {
	select {
	case c.undeclared <- struct{}{}:
	default: // a declaration is already due
	}
}

// keepDeclared repeats declarations until they succeed.
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
			case <-c.undeclared: // new devices, or a new connection
			case <-time.After(pause):
			}
		}
	}
}

// sync declares the devices, unless there are none or the agent has refused them. It returns an error
// if a repetition can help.
func (c *Client) sync(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, syncTimeout)
	defer cancel()
	select {
	case c.syncing <- struct{}{}:
		defer func() { <-c.syncing }()
	case <-ctx.Done():
		return ctx.Err()
	}
	declared := c.declared.Load()
	if declared == nil || declared.refused {
		return nil
	}
	_, err := c.link.SyncDevices(ctx, &drahealthv1.SyncDevicesRequest{Devices: declared.devices})
	switch status.Code(err) {
	case codes.OK:
		c.doubt(0)
		return nil
	case codes.Unimplemented:
		return nil
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return err // the health stream reports that the agent is absent
	case codes.InvalidArgument:
		declared.refused = true
	}
	if !declared.reported {
		declared.reported = true
		c.complain(ctx, err, "the drahealth agent refused the driver's devices")
	}
	return err
}
