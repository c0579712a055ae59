package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"tags.cncf.io/container-device-interface/specs-go"
)

// grant is what a claim was given of one device.
type grant struct {
	result resourceapi.DeviceRequestAllocationResult
	device *hostDevice
	wanted parameters
}

// cdiFiles are those that tell the container runtime what containers see of a claim's devices: one
// file for each claim. CPUs and pages are named to them, pages are mounted. Nothing is enforced:
// cgroups are the kubelet's and the runtime's.
type cdiFiles struct {
	directory string
	driver    string
}

func (c cdiFiles) path(claim types.UID) string {
	return filepath.Join(c.directory, c.driver+"-"+string(claim)+".json")
}

// has says whether a claim has its file. It is gone after a reboot, with everything else that was
// prepared.
func (c cdiFiles) has(claim types.UID) bool {
	_, err := os.Stat(c.path(claim))
	return err == nil
}

// write makes a claim's file, whole or not at all, and returns a CDI id for each grant: the kubelet
// shows a device's health under its first id, so no two have the same.
func (c cdiFiles) write(claim types.UID, grants []grant) ([]string, error) {
	kind := c.driver + "/device"
	spec := specs.Spec{Version: "0.6.0", Kind: kind}
	var ids []string
	for _, one := range grants {
		request := strings.ReplaceAll(one.result.Request, "/", ".")
		name := strings.Join([]string{string(claim), request, one.device.name}, "_")
		spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: edits(one)})
		ids = append(ids, kind+"="+name)
	}
	if spec.Devices == nil {
		return nil, nil // a spec without devices is none
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	partial := filepath.Join(c.directory, "."+filepath.Base(c.path(claim)))
	if err := os.WriteFile(partial, data, 0o644); err != nil {
		return nil, err
	}
	return ids, os.Rename(partial, c.path(claim))
}

func (c cdiFiles) remove(claim types.UID) error {
	if err := os.Remove(c.path(claim)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// edits are what a container sees: GODEV_CPUS_NODE0_0=0-1,
// GODEV_HUGEPAGES_2MI_NODE0_0=/dev/hugepages/<device>.
func edits(of grant) specs.ContainerEdits {
	variable := "GODEV_" + strings.ToUpper(strings.ReplaceAll(of.device.name, "-", "_"))
	if of.device.pages == 0 {
		return specs.ContainerEdits{Env: []string{variable + "=" + of.wanted.cpus.String()}}
	}
	at := "/dev/hugepages/" + of.device.name
	size := of.device.size.Value()
	return specs.ContainerEdits{
		Env: []string{variable + "=" + at},
		Mounts: []*specs.Mount{{
			HostPath:      "hugetlbfs",
			ContainerPath: at,
			Type:          "hugetlbfs",
			Options: []string{
				"nosuid", "nodev", "mode=1777",
				fmt.Sprintf("pagesize=%dK", size/1024),
				fmt.Sprintf("size=%dK", of.wanted.pages*size/1024),
			},
		}},
	}
}
