// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"drahealth.example.com/go/drahealth"
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
		for _, one := range grants {
			if err := d.host.check(one.device, one.wanted); err != nil {
				return nil, err
			}
		}
	}
	ids, err := d.cdi.write(claim.UID, grants)
	if err != nil {
		return nil, drahealth.Doing(drahealth.OpCDI, err)
	}
	devices := make([]kubeletplugin.Device, len(grants))
	for i, one := range grants {
		devices[i] = kubeletplugin.Device{
			Requests:     []string{one.result.Request},
			PoolName:     one.result.Pool,
			DeviceName:   one.result.Device,
			CDIDeviceIDs: ids[i : i+1],
			ShareID:      one.result.ShareID,
		}
	}
	return devices, nil
}

// unprepare releases the devices of a claim. It succeeds for a claim that was never prepared.
func (d *driver) unprepare(_ context.Context, claim kubeletplugin.NamespacedObject) error {
	return drahealth.Doing(drahealth.OpCDI, d.cdi.remove(claim.UID))
}

// publish hands the ResourceSlices to the helper, which keeps them in the API server.
func (d *driver) publish(ctx context.Context, helper *kubeletplugin.Helper, taints drahealth.Taints) error {
	pools := map[string]resourceslice.Pool{d.node: d.host.published(taints[d.node])}
	return helper.PublishResources(ctx, resourceslice.DriverResources{Pools: pools})
}
