// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

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

// partialSuffix ends the name of a file that is being written. Container runtimes read the files with a CDI
// extension, .json or .yaml, also hidden ones.
const partialSuffix = ".new"

// grant is the part of one device that a claim gets.
type grant struct {
	result resourceapi.DeviceRequestAllocationResult
	device *hostDevice
	wanted parameters
}

// cdiFiles writes one CDI file for each claim, from which the container runtime sets environment
// variables and mounts a hugetlbfs. The driver sets no cgroups: kubelet and runtime do.
type cdiFiles struct {
	directory string
	driver    string
}

func (c cdiFiles) path(claim types.UID) string {
	return filepath.Join(c.directory, c.driver+"-"+string(claim)+".json")
}

// has reports whether a claim has its file. The file, like all prepared state, is lost in a reboot.
func (c cdiFiles) has(claim types.UID) bool {
	_, err := os.Stat(c.path(claim))
	return err == nil
}

// write writes a claim's file atomically and returns a CDI id for each grant. The ids differ because
// the kubelet finds the health of a device by its first CDI id.
func (c cdiFiles) write(claim types.UID, grants []grant) ([]string, error) {
	kind := c.driver + "/device"
	spec := specs.Spec{Version: "0.6.0", Kind: kind}
	var ids []string
	for _, grant := range grants {
		request := strings.ReplaceAll(grant.result.Request, "/", ".")
		name := strings.Join([]string{string(claim), request, grant.device.name}, "_")
		spec.Devices = append(spec.Devices, specs.Device{Name: name, ContainerEdits: edits(grant)})
		ids = append(ids, kind+"="+name)
	}
	if spec.Devices == nil {
		return nil, nil // a CDI spec without devices is invalid
	}
	data, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	partial := c.path(claim) + partialSuffix
	if err := writeSynced(partial, data); err != nil {
		return nil, err
	}
	return ids, os.Rename(partial, c.path(claim))
}

// writeSynced writes a file and waits until its content is on the disk.
func writeSynced(path string, data []byte) error {
	file, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	return errors.Join(err, file.Sync(), file.Close())
}

// remove removes a claim's file, and the rest of a write that was interrupted.
func (c cdiFiles) remove(claim types.UID) error {
	var failures []error
	for _, path := range []string{c.path(claim) + partialSuffix, c.path(claim)} {
		if err := os.Remove(path); !errors.Is(err, fs.ErrNotExist) {
			failures = append(failures, err)
		}
	}
	return errors.Join(failures...)
}

// edits returns the changes of a container: GODEV_CPUS_NODE0_0=0-1,
// GODEV_HUGEPAGES_2MI_NODE0_0=/dev/hugepages/<device>.
func edits(granted grant) specs.ContainerEdits {
	variable := "GODEV_" + strings.ToUpper(strings.ReplaceAll(granted.device.name, "-", "_"))
	if granted.device.pages == 0 {
		return specs.ContainerEdits{Env: []string{variable + "=" + granted.wanted.cpus.String()}}
	}
	at := "/dev/hugepages/" + granted.device.name
	size := granted.device.size.Value()
	return specs.ContainerEdits{
		Env: []string{variable + "=" + at},
		Mounts: []*specs.Mount{{
			HostPath:      "hugetlbfs",
			ContainerPath: at,
			Type:          "hugetlbfs",
			Options: []string{
				"nosuid", "nodev", "mode=1777",
				fmt.Sprintf("pagesize=%dK", size/1024),
				fmt.Sprintf("size=%dK", granted.wanted.pages*size/1024),
			},
		}},
	}
}
