package main

import (
	"fmt"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
	"k8s.io/utils/cpuset"
	"sigs.k8s.io/json"

	"drahealth.example.com/go-driver/drahealth"
)

// CPUParameters are what a user may say of CPUs: which of the device's; default: all.
type CPUParameters struct {
	metav1.TypeMeta `json:",inline"`
	CPUs            *string `json:"cpus"`
}

// HugepagesParameters are what a user may say of hugepages: how many of the device's; default: all.
type HugepagesParameters struct {
	metav1.TypeMeta `json:",inline"`
	Pages           *int64 `json:"pages"`
}

// parameters are what a claim wants of one device.
type parameters struct {
	cpus  cpuset.CPUSet
	pages int64
}

// wanted is all of the device, unless the claim or its DeviceClass say less; the claim comes last,
// and has the last word.
func (d *driver) wanted(
	claim *resourceapi.ResourceClaim, result resourceapi.DeviceRequestAllocationResult, device *hostDevice,
) (parameters, error) {
	wanted := parameters{device.cpus, device.pages}
	for _, config := range resourceclaim.ConfigForResult(claim.Status.Allocation.Devices.Config, result) {
		if config.Opaque == nil || config.Opaque.Driver != d.name {
			continue
		}
		said, err := d.decode(config.Opaque.Parameters.Raw)
		if err != nil {
			return parameters{}, drahealth.Doing(drahealth.Config, err)
		}
		switch said := said.(type) {
		case *CPUParameters:
			err = wanted.takeCPUs(said, device)
		case *HugepagesParameters:
			err = wanted.takePages(said, device)
		}
		if err != nil {
			return parameters{}, err
		}
	}
	return wanted, nil
}

// decode reads strictly: what is not understood is refused, and not ignored.
func (d *driver) decode(raw []byte) (any, error) {
	var head metav1.TypeMeta
	if err := json.UnmarshalCaseSensitivePreserveInts(raw, &head); err != nil {
		return nil, err
	}
	var said any
	switch head.APIVersion + "/" + head.Kind {
	case d.name + "/v1/CpuParameters":
		said = &CPUParameters{}
	case d.name + "/v1/HugepagesParameters":
		said = &HugepagesParameters{}
	default:
		return nil, fmt.Errorf("kind %q of %q is neither CpuParameters nor HugepagesParameters of %s/v1",
			head.Kind, head.APIVersion, d.name)
	}
	strict, err := json.UnmarshalStrict(raw, said)
	if err == nil && len(strict) > 0 {
		err = strict[0]
	}
	return said, err
}

func (p *parameters) takeCPUs(said *CPUParameters, device *hostDevice) error {
	if device.pages > 0 {
		return drahealth.BadConfig("config.conflict", "CpuParameters for %s, which has pages", device.name)
	}
	if said.CPUs == nil {
		return nil
	}
	cpus, err := cpuset.Parse(*said.CPUs)
	if err != nil || cpus.IsEmpty() {
		return drahealth.BadConfig("cpu.opaque_cpuset.invalid", "%q names no CPUs", *said.CPUs)
	}
	if others := cpus.Difference(device.cpus); !others.IsEmpty() {
		return drahealth.BadConfig("cpu.opaque_cpuset.invalid",
			"CPUs %s are not of %s, which has %s", others, device.name, device.cpus)
	}
	p.cpus = cpus
	return nil
}

func (p *parameters) takePages(said *HugepagesParameters, device *hostDevice) error {
	if device.pages == 0 {
		return drahealth.BadConfig("config.conflict", "HugepagesParameters for %s, which has CPUs", device.name)
	}
	if said.Pages == nil {
		return nil
	}
	if *said.Pages < 1 || *said.Pages > device.pages {
		return drahealth.BadConfig("config.invalid",
			"%d pages of %s, which has %d", *said.Pages, device.name, device.pages)
	}
	p.pages = *said.Pages
	return nil
}
