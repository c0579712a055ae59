// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	pb "drahealth.example.com/go/drahealthv1"
)

const (
	// firstTaints is how long devices wait for their first taints if no agent can be reached, and
	// busyTaints if an agent is asked and does not answer, as on a node that starts. ResourceSlices from
	// before a restart of the driver may have taints, which publishing without taints would remove.
	firstTaints = 5 * time.Second
	busyTaints  = 30 * time.Second
	// publishMin and publishMax limit the pause before taints that could not be published are published
	// again.
	publishMin = time.Second
	publishMax = 30 * time.Second
)

// SliceLimit returns the maximum number of devices in a ResourceSlice of the pool. A slice with at most
// 64 devices never has to be split because of a taint.
func (t Taints) SliceLimit(pool string) int {
	for _, taints := range t[pool] {
		if len(taints) > 0 {
			return resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
		}
	}
	return resourceapi.ResourceSliceMaxDevices
}

// Without returns the taints without those of one effect. An API server 1.34 with device taints enabled
// refuses a slice that has taints of resourceapi.DeviceTaintEffectNone.
func (t Taints) Without(effect resourceapi.DeviceTaintEffect) Taints {
	rest := make(Taints, len(t))
	for pool, devices := range t {
		rest[pool] = make(map[string][]resourceapi.DeviceTaint, len(devices))
		for name, taints := range devices {
			for _, taint := range taints {
				if taint.Effect != effect {
					rest[pool][name] = append(rest[pool][name], taint)
				}
			}
		}
	}
	return rest
}

// WatchTaints calls publish, in the caller's goroutine, with all taints of the driver's devices: at the
// start and after each change. They replace the published taints. When publish returns, the taints should
// be in the API server, because an error about a failed device waits for that (see TaintWait). The helper's
// PublishResources returns before it writes: publish can read the ResourceSlices until they have the taints, or
// it returns at once, and the taint before the error is best effort. After an
// error publish is called again, with pauses of 1 s to 30 s, and OnError gets the first of these errors.
// While publish runs, newer taints replace older ones that wait. While the agent is absent publish is not
// called, so that taints stay. Only if there are no taints within 5 s of the start, or within 30 s if an
// agent is reached that does not answer, publish is called without any, so that the driver's devices can be
// allocated without an agent. WatchTaints blocks until ctx is done.
func (c *Client) WatchTaints(ctx context.Context, publish func(context.Context, Taints) error) {
	var reader sync.WaitGroup
	defer reader.Wait()
	c.published.watch(1)
	defer c.published.watch(-1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	newest := make(chan Taints, 1)
	var asked atomic.Bool
	reader.Go(func() { c.readTaints(ctx, newest, &asked) })
	var taints Taints
	var again <-chan time.Time // nil: the taints are published
	began, late := time.Now(), time.After(firstTaints)
	pause := publishMin
	for {
		select {
		case <-ctx.Done():
			return
		case taints = <-newest:
			late = nil
		case <-late:
			// select takes a random one of several cases: taints that wait are published instead
			if len(newest) > 0 || asked.Load() && time.Since(began) < busyTaints {
				late = time.After(time.Second)
				continue
			}
		case <-again:
		}
		err := publish(ctx, taints)
		switch {
		case err == nil:
			c.published.set(taints)
			again, pause = nil, publishMin
			continue
		case ctx.Err() != nil:
			return
		case again == nil:
			c.complain(ctx, err, "taints were not published; they are published again")
		}
		again, pause = time.After(pause), min(2*pause, publishMax)
	}
}

// readTaints reads the agent's taint stream, and opens it again when it ends, until ctx is done. asked is true
// while a stream is opened or open.
func (c *Client) readTaints(ctx context.Context, newest chan Taints, asked *atomic.Bool) {
	complained := false
	for pause := retryMin; ; pause = min(2*pause, declareMax) {
		began := time.Now()
		asked.Store(true)
		err := c.readTaintStream(ctx, newest)
		asked.Store(false)
		switch code := status.Code(err); {
		case time.Since(began) > steady:
			pause = retryMin
		case code == codes.Unavailable:
			pause = min(pause, retryMax)
		case code == codes.FailedPrecondition && !complained:
			complained = true
			c.complain(ctx, err, "the drahealth agent does not serve taints")
		}
		if !sleep(ctx, pause) {
			return
		}
	}
}

func (c *Client) readTaintStream(ctx context.Context, newest chan Taints) error {
	c.declareAgain(ctx)
	stream, err := c.link.WatchTaints(ctx, &pb.WatchTaintsRequest{})
	if err != nil {
		return err
	}
	for {
		message, err := stream.Recv()
		if err != nil {
			return err
		}
		select {
		case <-newest: // drop taints that were not taken yet
		default:
		}
		newest <- taintsOf(message)
	}
}

func taintsOf(message *pb.DeviceTaints) Taints {
	all := Taints{}
	for _, entry := range message.GetDevices() {
		taints := make([]resourceapi.DeviceTaint, 0, len(entry.GetTaints()))
		for _, sent := range entry.GetTaints() {
			taint := resourceapi.DeviceTaint{Key: sent.GetKey(), Value: sent.GetValue(), Effect: effectOf(sent.GetEffect())}
			if at := sent.GetTimeAddedS(); at > 0 {
				taint.TimeAdded = &metav1.Time{Time: time.Unix(at, 0)}
			}
			taints = append(taints, taint)
		}
		if all[entry.GetPool()] == nil {
			all[entry.GetPool()] = map[string][]resourceapi.DeviceTaint{}
		}
		all[entry.GetPool()][entry.GetName()] = taints
	}
	return all
}

func effectOf(effect pb.TaintEffect) resourceapi.DeviceTaintEffect {
	switch effect {
	case pb.TaintEffect_TAINT_EFFECT_NO_SCHEDULE:
		return resourceapi.DeviceTaintEffectNoSchedule
	case pb.TaintEffect_TAINT_EFFECT_NO_EXECUTE:
		return resourceapi.DeviceTaintEffectNoExecute
	default: // an effect of a later version
		return resourceapi.DeviceTaintEffectNone
	}
}
