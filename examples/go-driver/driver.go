// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/klog/v2"

	"drahealth.example.com/go/drahealth"
)

const (
	// publishWait limits the wait for published taints.
	publishWait = 5 * time.Second
	// publishPoll is the pause between two reads of the ResourceSlices.
	publishPoll = 50 * time.Millisecond
)

// driver prepares claims for devices of the host. It keeps no state: the devices of a claim are in
// its CDI file, so that another instance can take over at any time.
type driver struct {
	name  string
	node  string
	host  *host
	cdi   cdiFiles
	agent *drahealth.Client
	fatal func(error)
}

func (d *driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	return d.agent.WatchHealthStatus(ctx, reports)
}

func (d *driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	return d.agent.Prepare(ctx, claims, d.prepare)
}

func (d *driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	return d.agent.Unprepare(ctx, claims, d.unprepare)
}

// HandleError handles background errors; those that are not recoverable end the driver.
func (d *driver) HandleError(ctx context.Context, err error, msg string) {
	utilruntime.HandleErrorWithContext(ctx, err, msg)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		d.fatal(err)
	}
}

// prepare prepares the devices of a claim. It is idempotent, also while the claim's pod uses the
// devices.
func (d *driver) prepare(_ context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	var grants []grant
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != d.name {
			continue
		}
		device := d.host.find(result.Device)
		if device == nil || result.Pool != d.node {
			return nil, drahealth.Permanent("device.unknown",
				"%s/%s is not on this node", result.Pool, result.Device)
		}
		wanted, err := d.wanted(claim, result, device)
		if err != nil {
			return nil, err
		}
		grants = append(grants, grant{result, device, wanted})
	}
	if !d.cdi.has(claim.UID) {
		for _, grant := range grants {
			if err := d.host.check(grant.device, grant.wanted); err != nil {
				return nil, err
			}
		}
	}
	ids, err := d.cdi.write(claim.UID, grants)
	if err != nil {
		return nil, drahealth.Doing(drahealth.OpCDI, err)
	}
	devices := make([]kubeletplugin.Device, len(grants))
	for i, grant := range grants {
		devices[i] = kubeletplugin.Device{
			Requests:     []string{grant.result.Request},
			PoolName:     grant.result.Pool,
			DeviceName:   grant.result.Device,
			CDIDeviceIDs: ids[i : i+1],
			ShareID:      grant.result.ShareID,
		}
	}
	return devices, nil
}

// unprepare releases the devices of a claim. It succeeds for a claim that was never prepared.
func (d *driver) unprepare(_ context.Context, claim kubeletplugin.NamespacedObject) error {
	return drahealth.Doing(drahealth.OpCDI, d.cdi.remove(claim.UID))
}

// publish hands the ResourceSlices to the helper, which writes them to the API server in the background, and
// waits until the API server has the taints, because WatchTaints takes them for published then. After publishWait
// it returns nevertheless: an API server with its feature gate for taints off never has them.
func (d *driver) publish(ctx context.Context, helper *kubeletplugin.Helper, client kubernetes.Interface, taints drahealth.Taints) error {
	pool := d.host.published(taints[d.node])
	pools := map[string]resourceslice.Pool{d.node: pool}
	if err := helper.PublishResources(ctx, resourceslice.DriverResources{Pools: pools}); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, publishWait)
	defer cancel()
	if err := d.waitPublished(ctx, client, pool); err != nil {
		klog.FromContext(ctx).Info("ResourceSlices do not have all taints yet", "waited", publishWait, "reason", err.Error())
	}
	return nil
}

// waitPublished waits until the node's ResourceSlices have the taints of a pool.
func (d *driver) waitPublished(ctx context.Context, client kubernetes.Interface, pool resourceslice.Pool) error {
	options := metav1.ListOptions{FieldSelector: fields.Set{
		resourceapi.ResourceSliceSelectorDriver:   d.name,
		resourceapi.ResourceSliceSelectorNodeName: d.node,
	}.String()}
	for {
		found, err := client.ResourceV1().ResourceSlices().List(ctx, options)
		if err == nil && haveTaints(found.Items, pool) {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-time.After(publishPoll):
		}
	}
}

// haveTaints reports whether ResourceSlices have all taints of a pool's devices.
func haveTaints(found []resourceapi.ResourceSlice, pool resourceslice.Pool) bool {
	type key struct {
		device, key, value string
		effect             resourceapi.DeviceTaintEffect
	}
	has := map[key]bool{}
	for _, slice := range found {
		for _, device := range slice.Spec.Devices {
			for _, taint := range device.Taints {
				has[key{device.Name, taint.Key, taint.Value, taint.Effect}] = true
			}
		}
	}
	for _, slice := range pool.Slices {
		for _, device := range slice.Devices {
			for _, taint := range device.Taints {
				if !has[key{device.Name, taint.Key, taint.Value, taint.Effect}] {
					return false
				}
			}
		}
	}
	return true
}
