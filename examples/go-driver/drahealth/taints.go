package drahealth

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	pb "drahealth.example.com/go-driver/drahealthv1"
)

// Taints are those of all of the driver's devices, by pool and name; the worst of a device first.
type Taints map[string]map[string][]resourceapi.DeviceTaint

// SliceLimit is how many devices a ResourceSlice of the pool may have. One that always has at most 64
// never has to be split for a taint.
func (t Taints) SliceLimit(pool string) int {
	for _, taints := range t[pool] {
		if len(taints) > 0 {
			return resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures
		}
	}
	return resourceapi.ResourceSliceMaxDevices
}

// Without leaves out taints of one effect: resourceapi.DeviceTaintEffectNone, for an API server of
// 1.34 with device taints turned on, refuses the whole slice.
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

// WatchTaints calls publish, in the caller's goroutine, with the taints that the driver's devices
// should have: when it begins, and each time they have changed. They replace all that were published
// before. It may take its time: then it misses some, never the last. While the agent is away it is
// not called, since nobody sees that a device is well again. It returns when ctx is done.
func (c *Client) WatchTaints(ctx context.Context, publish func(Taints)) {
	var reader sync.WaitGroup
	defer reader.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	newest := make(chan Taints, 1)
	reader.Go(func() { c.readTaints(ctx, newest) })
	for {
		select {
		case <-ctx.Done():
			return
		case taints := <-newest:
			publish(taints)
		}
	}
}

// readTaints reads one stream of the agent after the other until ctx is done.
func (c *Client) readTaints(ctx context.Context, newest chan Taints) {
	complained := false
	for pause := retryMin; ; pause = min(2*pause, declareMax) {
		began := time.Now()
		err := c.readTaintStream(ctx, newest)
		switch code := status.Code(err); {
		case time.Since(began) > steady:
			pause = retryMin
		case code == codes.Unavailable:
			pause = min(pause, retryMax)
		case code == codes.FailedPrecondition && !complained:
			complained = true
			c.complain(ctx, err, "the drahealth agent tells no taints")
		}
		if !sleep(ctx, pause) {
			return
		}
	}
}

func (c *Client) readTaintStream(ctx context.Context, newest chan Taints) error {
	if c.sync(ctx) != nil {
		c.declareSoon()
	}
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
		case <-newest: // nobody has come for it
		default:
		}
		newest <- taintsOf(message)
	}
}

func taintsOf(message *pb.DeviceTaints) Taints {
	all := Taints{}
	for _, told := range message.GetDevices() {
		taints := make([]resourceapi.DeviceTaint, 0, len(told.GetTaints()))
		for _, one := range told.GetTaints() {
			taint := resourceapi.DeviceTaint{Key: one.GetKey(), Value: one.GetValue(), Effect: effectOf(one.GetEffect())}
			if at := one.GetTimeAddedS(); at > 0 {
				taint.TimeAdded = &metav1.Time{Time: time.Unix(at, 0)}
			}
			taints = append(taints, taint)
		}
		if all[told.GetPool()] == nil {
			all[told.GetPool()] = map[string][]resourceapi.DeviceTaint{}
		}
		all[told.GetPool()][told.GetName()] = taints
	}
	return all
}

func effectOf(effect pb.TaintEffect) resourceapi.DeviceTaintEffect {
	switch effect {
	case pb.TaintEffect_TAINT_EFFECT_NO_SCHEDULE:
		return resourceapi.DeviceTaintEffectNoSchedule
	case pb.TaintEffect_TAINT_EFFECT_NO_EXECUTE:
		return resourceapi.DeviceTaintEffectNoExecute
	default: // of a later version
		return resourceapi.DeviceTaintEffectNone
	}
}
