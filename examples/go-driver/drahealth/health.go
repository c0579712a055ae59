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

// WatchHealthStatus is the body of the driver's method: what the agent says of the driver's devices
// goes to the kubelet as it is. Each call has a stream of its own. It returns nil when ctx is done,
// and not before: a stream that ends makes the kubelet forget the health of all devices.
//
// When the agent ends, is silent, or was never there, all devices are Unknown at once, and the
// message says why. Nothing is ever said twice for the agent: who repeats that a device was Healthy
// renews a lease that nobody earned.
func (c *Client) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	var reader sync.WaitGroup
	defer reader.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	lists := make(chan list)
	reader.Go(func() { c.readHealth(ctx, lists) })

	speaker, outage := newSpeaker(time.Now()), ""
	timer := time.NewTimer(firstAnswer)
	for {
		var said [][]kubeletplugin.DeviceHealth
		timer.Reset(time.Until(speaker.due()))
		select {
		case <-ctx.Done():
			return nil
		case got := <-lists:
			if got.err != nil {
				said = speaker.lost(reasonOf(got.err), c.declared.Load(), time.Now())
			} else {
				said = speaker.heard(got, time.Now())
			}
		case <-timer.C:
			var hangs bool
			said, hangs = speaker.waited(c.declared.Load(), time.Now())
			if hangs {
				c.disconnect()
			}
		}
		if speaker.outage != outage {
			outage = speaker.outage
			klog.FromContext(ctx).Info(cmp.Or(outage, "drahealth agent answers"))
		}
		began := time.Now()
		for _, devices := range said {
			select {
			case <-ctx.Done():
				return nil
			case reports <- kubeletplugin.DeviceHealthReport{Devices: devices}:
			}
		}
		speaker.busy(time.Since(began))
	}
}

// list is a message of the agent's health stream, or what ended the stream.
type list struct {
	devices []kubeletplugin.DeviceHealth
	first   bool // of its stream
	err     error
}

// readHealth reads one stream of the agent after the other until ctx is done.
func (c *Client) readHealth(ctx context.Context, lists chan<- list) {
	for pause := retryMin; ; pause = min(2*pause, retryMax) {
		began := time.Now()
		err := c.readStream(ctx, lists)
		if time.Since(began) > steady { // else each short life would be two changes of every device
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
	if c.sync(ctx) != nil {
		c.declareSoon()
	}
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
	for _, told := range message.GetDevices() {
		device := kubeletplugin.DeviceHealth{
			PoolName:           told.GetDevice().GetPoolName(),
			DeviceName:         told.GetDevice().GetDeviceName(),
			Health:             kubeletplugin.HealthStatusUnknown,
			HealthCheckTimeout: seconds(told.GetHealthCheckTimeoutSeconds()),
			Message:            told.GetMessage(),
		}
		switch told.GetHealth() {
		case healthv1.HealthStatus_HEALTHY:
			device.Health = kubeletplugin.HealthStatusHealthy
		case healthv1.HealthStatus_UNHEALTHY:
			device.Health = kubeletplugin.HealthStatusUnhealthy
		}
		if at := told.GetLastUpdatedTime(); at > 0 {
			device.LastUpdated = time.Unix(at, 0)
		}
		devices = append(devices, device)
	}
	return devices
}

// seconds of a lease: more than a day is none that the agent gives, and might not fit.
func seconds(number int64) time.Duration {
	return time.Duration(max(0, min(number, 86_400))) * time.Second
}

// reasonOf says why there is nothing of the agent: the same for the same, or each try would be a
// change of health.
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
