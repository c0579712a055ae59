// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"drahealth.example.com/go/drahealth"
	"sigs.k8s.io/dra-example-driver/pkg/consts"
)

// newAgent returns the client of the agent on the node. The devices of this driver are simulated: the check of
// a device finds the text of its file in $DEVICE_STATES.
func newAgent(d *driver, config *Config) (*drahealth.Client, error) {
	agent, err := drahealth.New(consts.DriverName,
		drahealth.Socket(os.Getenv("DRAHEALTH_SOCKET")), drahealth.OnError(d.HandleError))
	if err != nil {
		return nil, err
	}
	err = agent.Check(drahealth.HealthCheck{
		Name: "simulated", Every: time.Second, RaiseAfter: 1, ClearAfter: 1,
		Run: func(_ context.Context, device drahealth.Device) (*drahealth.Finding, error) {
			state, err := os.ReadFile(filepath.Join(os.Getenv("DEVICE_STATES"), device.Name))
			if errors.Is(err, fs.ErrNotExist) {
				return nil, nil
			} else if err != nil {
				return nil, err
			}
			return drahealth.Unhealthy("gpu.simulated", "state is %s", state), nil
		},
	})
	if err != nil {
		return nil, err
	}
	var devices []drahealth.Device
	for name := range d.state.allocatable {
		devices = append(devices, drahealth.Device{Name: name, Pool: config.flags.nodeName})
	}
	agent.Declare(devices...)
	return agent, nil
}

func (d *driver) WatchHealthStatus(ctx context.Context, reports chan<- kubeletplugin.DeviceHealthReport) error {
	return d.agent.WatchHealthStatus(ctx, reports)
}

// prepareClaim prepares one claim for drahealth.Client.Prepare.
func (d *driver) prepareClaim(ctx context.Context, claim *resourceapi.ResourceClaim) ([]kubeletplugin.Device, error) {
	result := d.prepareResourceClaim(ctx, claim)
	return result.Devices, result.Err
}
