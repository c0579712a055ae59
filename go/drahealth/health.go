// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"cmp"
	"context"
	"errors"
	"io"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"
	healthv1 "k8s.io/kubelet/pkg/apis/dra-health/v1"
)

// WatchHealthStatus is the body of the driver's method: it forwards the agent's health lists to the
// kubelet unchanged, but not the host's devices if the driver declares devices. Each call has its own stream.
// It returns nil, and only when ctx is done, because the kubelet discards the health of all devices when a
// stream ends.
//
// When the agent stops, is silent, or never answered, all devices become Unknown at once, with the
// reason as message. No list of the agent is repeated: that would renew the lease of a device that the
// agent has not verified.
func (c *Client) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	var reader sync.WaitGroup
	defer reader.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lists := make(chan list)
	reader.Go(func() { c.readHealth(ctx, lists) })

	relay, outage := newRelay(time.Now()), ""
	timer := time.NewTimer(firstAnswer)
	for {
		var updates [][]kubeletplugin.DeviceHealth
		timer.Reset(time.Until(relay.due()))
		select {
		case <-ctx.Done():
			return nil
		case got := <-lists:
			if got.err != nil {
				updates = relay.lost(reasonOf(got.err), c.declared.Load(), time.Now())
			} else {
				updates = relay.received(got, c.declared.Load(), time.Now())
				relay.hide(updates, c.checks.unknown(), time.Now())
			}
		case <-timer.C:
			var hangs bool
			updates, hangs = relay.waited(c.declared.Load(), time.Now())
			if hangs {
				c.disconnect()
			}
		}
		if relay.outage != outage {
			outage = relay.outage
			klog.FromContext(ctx).Info(cmp.Or(outage, "drahealth agent answers"))
		}
		began := time.Now()
		for _, devices := range updates {
			if len(devices) == 0 {
				continue
			}
			select {
			case <-ctx.Done():
				return nil
			case reports <- kubeletplugin.DeviceHealthReport{Devices: devices}:
			}
		}
		relay.busy(time.Since(began))
	}
}

// list is a message of the agent's health stream, or the error that ended the stream.
type list struct {
	devices []kubeletplugin.DeviceHealth
	first   bool // first list of its stream
	err     error
}

// readHealth reads the agent's health stream, and opens it again when it ends, until ctx is done.
func (c *Client) readHealth(ctx context.Context, lists chan<- list) {
	for pause := retryMin; ; pause = min(2*pause, retryMax) {
		began := time.Now()
		err := c.readStream(ctx, lists)
		if time.Since(began) > steady { // each short stream would change every device twice
			pause = retryMin
		}
		select {
		case lists <- list{err: err}:
		case <-ctx.Done():
		}
		if !sleep(ctx, pause) {
			return
		}
	}
}

// readStream reads one stream until it ends.
func (c *Client) readStream(ctx context.Context, lists chan<- list) error {
	c.declareAgain(ctx)
	stream, err := healthv1.NewDRAResourceHealthClient(c.conn).NodeWatchResources(ctx, &healthv1.NodeWatchResourcesRequest{})
	if err != nil {
		return err
	}
	for first := true; ; first = false {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		if first {
			c.doubt(0)
		}
		select {
		case lists <- list{devices: devicesOf(message), first: first}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func devicesOf(message *healthv1.NodeWatchResourcesResponse) []kubeletplugin.DeviceHealth {
	devices := make([]kubeletplugin.DeviceHealth, 0, len(message.GetDevices()))
	for _, entry := range message.GetDevices() {
		device := kubeletplugin.DeviceHealth{
			PoolName:           entry.GetDevice().GetPoolName(),
			DeviceName:         entry.GetDevice().GetDeviceName(),
			Health:             kubeletplugin.HealthStatusUnknown,
			HealthCheckTimeout: seconds(entry.GetHealthCheckTimeoutSeconds()),
			Message:            entry.GetMessage(),
		}
		switch entry.GetHealth() {
		case healthv1.HealthStatus_HEALTHY:
			device.Health = kubeletplugin.HealthStatusHealthy
		case healthv1.HealthStatus_UNHEALTHY:
			device.Health = kubeletplugin.HealthStatusUnhealthy
		}
		if at := entry.GetLastUpdatedTime(); at > 0 {
			device.LastUpdated = time.Unix(at, 0)
		}
		devices = append(devices, device)
	}
	return devices
}

// seconds converts a lease, limited to a day so that it does not overflow.
func seconds(number int64) time.Duration {
	return time.Duration(max(0, min(number, 86_400))) * time.Second
}

// reasonOf returns the reason why the agent does not answer. The text is stable for a cause, so that
// retries do not change the health.
func reasonOf(err error) string {
	switch code := status.Code(err); {
	case errors.Is(err, io.EOF):
		return noAnswer + "it ended the stream"
	case code == codes.Unavailable:
		return noAnswer + "there is no connection to it"
	case code == codes.Unimplemented:
		return noAnswer + "it does not serve health"
	default:
		return noAnswer + "its stream failed with " + code.String()
	}
}
