// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/cpuset"
	"sigs.k8s.io/json"

	"drahealth.example.com/go/drahealth"
)

// CPUParameters select CPUs of a device; default: all.
type CPUParameters struct {
	metav1.TypeMeta `json:",inline"`
	CPUs            *string `json:"cpus"`
}

// HugepagesParameters set the number of hugepages of a device; default: all.
type HugepagesParameters struct {
	metav1.TypeMeta `json:",inline"`
	Pages           *int64 `json:"pages"`
}

// parameters are the CPUs or the number of hugepages that a claim gets of one device.
type parameters struct {
	cpus  cpuset.CPUSet
	pages int64
}

// wanted returns all of the device, unless parameters of the claim or its DeviceClass select less. The
// claim takes precedence.
func (d *driver) wanted(
	claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult, device *hostDevice,
) (parameters, error) {
	wanted := parameters{device.cpus, device.pages}
	for _, config := range resourceclaim.ConfigForResult(claim.Status.Allocation.Devices.Config, result) {
		if config.Opaque == nil || config.Opaque.Driver != d.name {
			continue
		}
		decoded, err := d.decode(config.Opaque.Parameters.Raw)
		if err != nil {
			return parameters{}, drahealth.ForRequests(drahealth.Doing(drahealth.OpConfig, err), result.Request)
		}
		switch decoded := decoded.(type) {
		case *CPUParameters:
			err = wanted.takeCPUs(decoded, device)
		case *HugepagesParameters:
			err = wanted.takePages(decoded, device)
		}
		if err != nil {
			return parameters{}, drahealth.ForRequests(err, result.Request)
		}
	}
	return wanted, nil
}

// decode decodes strictly: unknown kinds and fields are errors.
func (d *driver) decode(raw []byte) (any, error) {
	var head metav1.TypeMeta
	if err := json.UnmarshalCaseSensitivePreserveInts(raw, &head); err != nil {
		return nil, err
	}
	var decoded any
	switch head.APIVersion + "/" + head.Kind {
	case d.name + "/v1/CpuParameters":
		decoded = &CPUParameters{}
	case d.name + "/v1/HugepagesParameters":
		decoded = &HugepagesParameters{}
	default:
		return nil, fmt.Errorf("kind %q of %q is neither CpuParameters nor HugepagesParameters of %s/v1",
			head.Kind, head.APIVersion, d.name)
	}
	strict, err := json.UnmarshalStrict(raw, decoded)
	if err == nil && len(strict) > 0 {
		err = strict[0]
	}
	return decoded, err
}

func (p *parameters) takeCPUs(given *CPUParameters, device *hostDevice) error {
	if device.pages > 0 {
		return drahealth.BadConfig("config.conflict", "CpuParameters for %s, which has pages", device.name)
	}
	if given.CPUs == nil {
		return nil
	}
	cpus, err := cpuset.Parse(*given.CPUs)
	if err != nil || cpus.IsEmpty() {
		return drahealth.BadConfig("cpu.opaque_cpuset.invalid", "%q is not a CPU list", *given.CPUs)
	}
	if others := cpus.Difference(device.cpus); !others.IsEmpty() {
		return drahealth.BadConfig("cpu.opaque_cpuset.invalid",
			"CPUs %s are not of %s, which has %s", others, device.name, device.cpus)
	}
	p.cpus = cpus
	return nil
}

func (p *parameters) takePages(given *HugepagesParameters, device *hostDevice) error {
	if device.pages == 0 {
		return drahealth.BadConfig("config.conflict", "HugepagesParameters for %s, which has CPUs", device.name)
	}
	if given.Pages == nil {
		return nil
	}
	if *given.Pages < 1 || *given.Pages > device.pages {
		return drahealth.BadConfig("config.invalid",
			"%d pages of %s, which has %d", *given.Pages, device.name, device.pages)
	}
	p.pages = *given.Pages
	return nil
}
