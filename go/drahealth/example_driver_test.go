// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth_test

import (
	"context"
	"errors"
	"log"
	"os"
	"os/signal"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"

	"drahealth.example.com/go/drahealth"
)

const name = "gpu.example.com"

// driver allocates one GPU, whose CDI file an administrator wrote.
type driver struct {
	node  string
	agent *drahealth.Client
}

func (d *driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	return d.agent.WatchHealthStatus(ctx, reports)
}

func (d *driver) PrepareResourceClaims(ctx context.Context, claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	return d.agent.Prepare(ctx, claims, d.prepare)
}

func (d *driver) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	return d.agent.Unprepare(ctx, claims, func(context.Context, kubeletplugin.NamespacedObject) error { return nil })
}

func (d *driver) HandleError(_ context.Context, err error, msg string) {
	log.Println(msg, err)
	if !errors.Is(err, kubeletplugin.ErrRecoverable) {
		os.Exit(1)
	}
}

func (d *driver) prepare(_ context.Context, claim *resourceapi.ResourceClaim) (devices []kubeletplugin.Device, _ error) {
	for _, result := range claim.Status.Allocation.Devices.Results {
		if result.Driver != name {
			continue
		}
		if _, err := os.Stat("/dev/" + result.Device); err != nil {
			return nil, drahealth.Doing(drahealth.OpDevice, err)
		}
		devices = append(devices, kubeletplugin.Device{
			Requests: []string{result.Request}, PoolName: result.Pool, DeviceName: result.Device,
			CDIDeviceIDs: []string{name + "/gpu=" + result.Device},
		})
	}
	return devices, nil
}

// resources returns the ResourceSlices' contents with the taints.
func (d *driver) resources(taints drahealth.Taints) resourceslice.DriverResources {
	gpu := resourceapi.Device{Name: "gpu-3", Taints: taints[d.node]["gpu-3"]}
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{Devices: []resourceapi.Device{gpu}}}}
	return resourceslice.DriverResources{Pools: map[string]resourceslice.Pool{d.node: pool}}
}

func (d *driver) run(ctx context.Context) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	d.agent, err = drahealth.New(name, drahealth.Version("v1.2.3"), drahealth.OnError(d.HandleError))
	if err != nil {
		return err
	}
	defer d.agent.Close()
	d.agent.Declare(drahealth.Device{Name: "gpu-3", Pool: d.node, Part: drahealth.GPU{PCI: "0000:3b:00.0"}})
	helper, err := kubeletplugin.Start(ctx, d, kubeletplugin.DriverName(name), kubeletplugin.NodeName(d.node),
		kubeletplugin.KubeClient(d.agent.KubeClient(client)))
	if err != nil {
		return err
	}
	defer helper.Stop()
	// best effort: PublishResources returns before the taints are in the API server
	d.agent.WatchTaints(ctx, func(ctx context.Context, taints drahealth.Taints) error {
		return helper.PublishResources(ctx, d.resources(taints))
	})
	return nil
}

// A complete driver with health, taints and classified errors.
func Example_driver() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	d := &driver{node: os.Getenv("NODE_NAME")}
	if err := d.run(ctx); err != nil {
		log.Fatal(err)
	}
}
