// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"

	pb "drahealth.example.com/go/drahealthv1"
)

// taintWait is the default of TaintWait.
const taintWait = 2 * time.Second

// TaintWait sets the longest time for which an error about a failed device waits until the function of
// WatchTaints has published the device's taint. Default: 2 s; 0: errors do not wait.
func TaintWait(limit time.Duration) Option { return func(c *Client) { c.taintWait = limit } }

// Taints are the taints of all devices of the driver, by pool and name, worst first.
type Taints map[string]map[string][]resourceapi.DeviceTaint

// published has the taints for which the function of WatchTaints was called last.
type published struct {
	mu       sync.Mutex
	watchers int
	taints   Taints
	changed  chan struct{} // closed by the next change; nil: no call waits
}

// watch counts the running calls of WatchTaints.
func (p *published) watch(more int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.watchers += more
	p.wake()
}

// set records taints that the driver has published.
func (p *published) set(taints Taints) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.taints = taints
	p.wake()
}

func (p *published) wake() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// missing returns a device without a published taint that keeps pods off, and a channel that is closed
// when that may have changed. Without WatchTaints no device is missing.
func (p *published) missing(devices []*pb.BlamedDevice) (*pb.BlamedDevice, <-chan struct{}) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, device := range devices {
		if p.watchers > 0 && !keepsPodsOff(p.taints[device.GetPool()][device.GetDevice()]) {
			if p.changed == nil {
				p.changed = make(chan struct{})
			}
			return device, p.changed
		}
	}
	return nil, nil
}

func keepsPodsOff(taints []resourceapi.DeviceTaint) bool {
	for _, taint := range taints {
		if taint.Effect != "None" { // modules of Kubernetes before 0.35 have no name for it
			return true
		}
	}
	return false
}

// waitTainted waits until the function of WatchTaints has published taints of the devices that the verdicts
// found failed, so that the scheduler gives them to no other pod before the kubelet has the error. OnError gets a
// taint that comes too late. A device that is not declared never has a taint.
func (c *Client) waitTainted(ctx context.Context, verdicts []*pb.PrepareVerdict) {
	var failed []*pb.BlamedDevice
	for _, verdict := range verdicts {
		if verdict.GetErrorClass() == pb.ErrorClass_ERROR_CLASS_FAILED_DEVICE {
			failed = append(failed, verdict.GetDevices()...)
		}
	}
	declared := c.declared.Load()
	failed = slices.DeleteFunc(failed, func(blamed *pb.BlamedDevice) bool {
		return !declared.has(device{blamed.GetPool(), blamed.GetDevice()})
	})
	limit := time.NewTimer(c.taintWait)
	defer limit.Stop()
	for {
		missing, changed := c.published.missing(failed)
		if missing == nil || c.taintWait == 0 {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		case <-limit.C:
			name := missing.GetPool() + "/" + missing.GetDevice()
			c.complain(ctx, fmt.Errorf("%s: no taint published within %s", name, c.taintWait),
				"the kubelet gets the error of a failed device before its taint")
			return
		}
	}
}
