// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"drahealth.example.com/go/drahealth"
)

// An operation decides what an errno means: a full disk is no failed device.
func ExampleDoing() {
	_, err := os.ReadFile("/var/run/cdi/missing.json")
	err = fmt.Errorf("claim default/it: %w", drahealth.Doing(drahealth.OpCDI, err))
	fmt.Println(drahealth.Evidence(err)[0])
	// Output: errno number=2 operation=cdi path="/var/run/cdi/missing.json"
}

// An error that was formatted with %v has lost what it wrapped.
func ExampleEvidence() {
	_, err := os.ReadFile("/dev/missing")
	fmt.Println(drahealth.Evidence(fmt.Errorf("gpu-3: %w", err))[0])
	fmt.Println(drahealth.Evidence(fmt.Errorf("gpu-3: %v", err))[0])
	// Output:
	// errno number=2 operation=unspecified path="/dev/missing"
	// text "gpu-3: open /dev/missing: no such file or directory"
}

func ExampleFailedDevice() {
	err := drahealth.FailedDevice("gpu-3", "gpu.link", "link %d is down", 2)
	fmt.Println(drahealth.Evidence(err)[0])
	// Output: driver-error class=failed-device code=gpu.link device=gpu-3 summary="link 2 is down"
}

func ExampleClassifiedError_After() {
	training := drahealth.Transient("gpu.training", "links train")
	later := training.After(30 * time.Second)
	fmt.Println(later, errors.Is(later, training))
	fmt.Println(drahealth.Evidence(later)[0])
	// Output:
	// links train true
	// driver-error class=transient code=gpu.training retry-after=30s summary="links train"
}

// The parameters of the user are invalid, whatever the decoder returns.
func ExampleBadConfig() {
	mode, modes := "fast", []string{"compute", "graphics"}
	err := drahealth.BadConfig("gpu.mode", "mode %q, not one of %v", mode, modes)
	fmt.Println(err)
	// Output: mode "fast", not one of [compute graphics]
}

// An API server 1.34 refuses taints of effect None.
func ExampleTaints_Without() {
	taints := drahealth.Taints{"node-1": {"gpu-3": {
		{Key: "gpu.example.com/degraded", Effect: resourceapi.DeviceTaintEffectNone},
		{Key: "gpu.example.com/lost", Effect: resourceapi.DeviceTaintEffectNoSchedule},
	}}}
	for _, taint := range taints.Without(resourceapi.DeviceTaintEffectNone)["node-1"]["gpu-3"] {
		fmt.Println(taint.Key)
	}
	// Output: gpu.example.com/lost
}

// A check of the driver's own: the device file must be a character device. Check comes before Declare. The
// function of a check can be tested without an agent.
func ExampleClient_Check() {
	agent, err := drahealth.New("card.example.com")
	if err != nil {
		log.Fatal(err)
	}
	defer agent.Close()
	check := drahealth.HealthCheck{
		Name: "device-file", Every: 5 * time.Second, Timeout: 2 * time.Second, RaiseAfter: 1,
		Run: func(_ context.Context, device drahealth.Device) (*drahealth.Finding, error) {
			path := "/dev/" + device.Name
			info, err := os.Stat(path)
			switch {
			case errors.Is(err, os.ErrNotExist):
				return drahealth.Unhealthy("card.missing", "%s does not exist", path), nil
			case err != nil:
				return nil, err // no result: the device becomes Unknown
			case info.Mode()&os.ModeCharDevice == 0:
				return drahealth.Unhealthy("card.no_device", "%s is not a character device", path), nil
			}
			return nil, nil
		},
	}
	if err := agent.Check(check); err != nil {
		log.Fatal(err)
	}
	card := drahealth.Device{Name: "card-0", Pool: "node-1"}
	agent.Declare(card)

	finding, err := check.Run(context.Background(), card)
	fmt.Println(finding.Code, finding.Evidence, err)
	// Output: card.missing /dev/card-0 does not exist <nil>
}

// A driver that prepares claims in parallel.
func ExampleClient_StartPrepare() {
	var agent *drahealth.Client
	var prepare func(*resourceapi.ResourceClaim) ([]kubeletplugin.Device, error)

	_ = func(ctx context.Context, claims []*resourceapi.ResourceClaim) map[types.UID]kubeletplugin.PrepareResult {
		results := map[types.UID]kubeletplugin.PrepareResult{}
		call := agent.StartPrepare(ctx, claims)
		for _, claim := range claims { // or a goroutine for each
			if err := call.Check(claim); err != nil {
				results[claim.UID] = kubeletplugin.PrepareResult{Err: err}
				continue
			}
			devices, err := prepare(claim)
			results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
			if err != nil {
				call.Fail(claim, err)
			} else {
				call.Done(claim)
			}
		}
		for uid, err := range call.Report() {
			results[uid] = kubeletplugin.PrepareResult{Err: err}
		}
		return results
	}
}

// A driver that can reset its devices does so when the agent expects a reset to help.
func ExampleError() {
	reset := func(err error) bool {
		var failure *drahealth.Error
		return errors.As(err, &failure) && failure.Repair() == drahealth.RepairResetDevice
	}
	fmt.Println(reset(errors.New("an error without the agent's verdict")))
	// Output: false
}
