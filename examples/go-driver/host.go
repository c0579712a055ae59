// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/dynamic-resource-allocation/resourceslice"
	"k8s.io/utils/cpuset"
	"k8s.io/utils/ptr"

	"drahealth.example.com/go/drahealth"
)

// sliceDevices is the number of devices per ResourceSlice: of more than 64, some would have to move to
// another slice as soon as one device is tainted.
const sliceDevices = resourceapi.ResourceSliceMaxDevicesWithAdvancedFeatures

// hostDevice is one allocatable device: CPUs, or hugepages of a NUMA node.
type hostDevice struct {
	name  string
	numa  int64
	cpus  cpuset.CPUSet
	size  resource.Quantity // page size
	pages int64             // 0 for a device of CPUs
}

// host has all allocatable devices, in the order of the flags.
type host struct {
	sysfs   string
	devices []hostDevice
}

// addCPUs parses the flag --cpus, LIST[@NUMA]: "0-3,8", "4-7@1".
func (h *host) addCPUs(flag string) error {
	list, numa, err := splitNUMA(flag)
	if err != nil {
		return err
	}
	cpus, err := cpuset.Parse(list)
	if err != nil || cpus.IsEmpty() {
		return fmt.Errorf("%q is not a CPU list; write 0-3,8 or 4-7@1", list)
	}
	h.add("cpus", hostDevice{numa: numa, cpus: cpus})
	return nil
}

// addHugepages parses the flag --hugepages, SIZE:PAGES[@NUMA]: "2Mi:8", "1Gi:1@1".
func (h *host) addHugepages(flag string) error {
	value, numa, err := splitNUMA(flag)
	if err != nil {
		return err
	}
	size, number, _ := strings.Cut(value, ":")
	quantity, err := resource.ParseQuantity(size)
	pages, errPages := strconv.ParseInt(number, 10, 32)
	if err != nil || errPages != nil || pages < 1 || quantity.Value() < 1024 {
		return fmt.Errorf("%q is not a page size and a count; write 2Mi:8 or 1Gi:1@1", value)
	}
	h.add("hugepages-"+strings.ToLower(quantity.String()), hostDevice{numa: numa, size: quantity, pages: pages})
	return nil
}

func splitNUMA(flag string) (string, int64, error) {
	rest, node, given := strings.Cut(flag, "@")
	if !given {
		return rest, 0, nil
	}
	numa, err := strconv.ParseInt(node, 10, 64)
	if err != nil || numa < 0 || numa > 1023 {
		return "", 0, fmt.Errorf("%q is not a NUMA node from 0 to 1023", node)
	}
	return rest, numa, nil
}

// add names and appends a device: cpus-node0-0, hugepages-2mi-node0-0. The names stay the same as long
// as the order of the flags does.
func (h *host) add(kind string, device hostDevice) {
	prefix := fmt.Sprintf("%s-node%d-", kind, device.numa)
	number := 0
	for _, other := range h.devices {
		if strings.HasPrefix(other.name, prefix) {
			number++
		}
	}
	device.name = prefix + strconv.Itoa(number)
	h.devices = append(h.devices, device)
}

// find returns the device with the name, or nil.
func (h *host) find(name string) *hostDevice {
	for i := range h.devices {
		if h.devices[i].name == name {
			return &h.devices[i]
		}
	}
	return nil
}

// declared returns the devices for the agent: each as it is published, with the CPUs or hugepages that
// it consists of.
func (h *host) declared(pool string) []drahealth.Device {
	var all []drahealth.Device
	for _, part := range h.devices {
		device := drahealth.Device{Name: part.name, Pool: pool}
		if part.pages > 0 {
			device.Part = drahealth.Hugepages{Size: part.size.String(), Pages: part.pages, NUMA: int(part.numa)}
		} else {
			device.Part = drahealth.CPUs{List: part.cpus.String(), NUMA: new(int(part.numa))}
		}
		all = append(all, device)
	}
	return all
}

// published returns the pool of the ResourceSlices, with these taints by device.
func (h *host) published(taints map[string][]resourceapi.DeviceTaint) resourceslice.Pool {
	pool := resourceslice.Pool{Slices: []resourceslice.Slice{{}}}
	for _, part := range h.devices {
		last := &pool.Slices[len(pool.Slices)-1]
		if len(last.Devices) == sliceDevices {
			pool.Slices = append(pool.Slices, resourceslice.Slice{})
			last = &pool.Slices[len(pool.Slices)-1]
		}
		kind, counted, number := "cpu", resourceapi.QualifiedName("cpus"), int64(part.cpus.Size())
		attributes := map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
			"numaNode": {IntValue: &part.numa},
		}
		if part.pages > 0 {
			kind, counted, number = "hugepages", "pages", part.pages
			attributes["pageSize"] = resourceapi.DeviceAttribute{StringValue: ptr.To(part.size.String())}
		}
		attributes["kind"] = resourceapi.DeviceAttribute{StringValue: &kind}
		last.Devices = append(last.Devices, resourceapi.Device{
			Name:       part.name,
			Attributes: attributes,
			Capacity: map[resourceapi.QualifiedName]resourceapi.DeviceCapacity{
				counted: {Value: *resource.NewQuantity(number, resource.DecimalSI)},
			},
			Taints: taints[part.name],
		})
	}
	return pool
}

// check verifies that the CPUs are online, or that enough hugepages are free.
func (h *host) check(device *hostDevice, wanted parameters) error {
	if device.pages == 0 {
		online, err := h.read("devices/system/cpu/online")
		if err != nil {
			return err
		}
		cpus, err := cpuset.Parse(online)
		if err != nil {
			return drahealth.Doing(drahealth.OpDevice, err)
		}
		if offline := wanted.cpus.Difference(cpus); !offline.IsEmpty() {
			return drahealth.FailedDevice(device.name, "cpu.offline", "CPUs %s are not online", offline)
		}
		return nil
	}
	const pools = "devices/system/node/node%d/hugepages/hugepages-%dkB/free_hugepages"
	text, err := h.read(fmt.Sprintf(pools, device.numa, device.size.Value()/1024))
	if err != nil {
		return err
	}
	free, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return drahealth.Doing(drahealth.OpDevice, err)
	}
	if free < wanted.pages {
		return drahealth.Transient("mem.hugepages.insufficient",
			"%d pages of %s needed on NUMA node %d, %d are free",
			wanted.pages, device.size.String(), device.numa, free)
	}
	return nil
}

func (h *host) read(path string) (string, error) {
	data, err := os.ReadFile(filepath.Join(h.sysfs, path))
	return strings.TrimSpace(string(data)), drahealth.Doing(drahealth.OpDevice, err)
}
