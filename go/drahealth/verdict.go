// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"time"

	pb "drahealth.example.com/go/drahealthv1"
)

// Class is what follows from a failure: whether a retry can help, and who must act.
type Class string

// The classes of failures.
const (
	ClassUnknown      Class = "unknown"       // no evidence for any class; handled like transient
	ClassTransient    Class = "transient"     // a retry can succeed
	ClassBadConfig    Class = "bad-config"    // the claim must change
	ClassFailedDevice Class = "failed-device" // a device of the claim is broken: it is Unhealthy, with a taint
	ClassPermanent    Class = "permanent"     // the node or the driver must change
)

// Repair is the mildest action that is expected to end a fault.
type Repair string

// The repairs, in their order: a later one interrupts more, or takes longer.
const (
	RepairNone            Repair = "none"             // none of these is needed or known: the advice says what to do
	RepairRestartWorkload Repair = "restart-workload" // restart the workloads that use the device
	RepairResetDevice     Repair = "reset-device"     // stop these workloads, then reset the device
	RepairReloadDriver    Repair = "reload-driver"    // drain the node, then load the kernel driver or start its services again
	RepairRebootNode      Repair = "reboot-node"      // drain and reboot the node
	RepairInspectHardware Repair = "inspect-hardware" // run a diagnostic; check seat, cables, power and cooling
	RepairContactVendor   Repair = "contact-vendor"   // ask the vendor's support
	RepairReplaceHardware Repair = "replace-hardware" // replace the device or its part
)

// Verdict is the agent's verdict on a claim that cannot be prepared, or not unprepared.
type Verdict struct {
	Class      Class
	Code       string        // stable and dotted, "gpu.xid.79"; docs/prepare-errors.md lists the agent's own
	Text       string        // the error for the kubelet: one line that changes only with the facts
	Summary    string        // one line of at most 200 characters
	Advice     string        // what an operator should do
	Evidence   []string      // the strongest first
	Confidence float64       // from 0, a guess, to 1, proof
	RetryAfter time.Duration // before a retry can succeed; 0: not known, or no retry can succeed
	Devices    []DeviceRef   // those that failed; of another class than ClassFailedDevice, those of the claim
	Count      int           // consecutive failures of the claim; 0: not recorded
	First      time.Time     // of these failures; zero: not recorded
	Repair     Repair        // of the devices that failed
}

// DeviceRef names a device of any driver.
type DeviceRef struct{ Driver, Pool, Device string }

// verdictOf converts a verdict; nil stays nil. Classes and repairs of a later version become
// ClassUnknown and RepairNone.
func verdictOf(message *pb.PrepareVerdict) *Verdict {
	if message == nil {
		return nil
	}
	verdict := &Verdict{
		Class:      classOf(message.GetErrorClass()),
		Code:       message.GetCode(),
		Text:       message.GetText(),
		Summary:    message.GetSummary(),
		Advice:     message.GetAdvice(),
		Evidence:   message.GetEvidence(),
		Confidence: message.GetConfidence(),
		RetryAfter: time.Duration(message.GetRetryAfterS() * float64(time.Second)),
		Count:      int(message.GetCount()),
		Repair:     repairOf(message.GetRepair()),
	}
	if first := message.GetFirstS(); first > 0 {
		verdict.First = time.Unix(0, int64(first*float64(time.Second)))
	}
	for _, device := range message.GetDevices() {
		verdict.Devices = append(verdict.Devices, DeviceRef{device.GetDriver(), device.GetPool(), device.GetDevice()})
	}
	return verdict
}

func classOf(class pb.ErrorClass) Class {
	switch class {
	case pb.ErrorClass_ERROR_CLASS_TRANSIENT:
		return ClassTransient
	case pb.ErrorClass_ERROR_CLASS_BAD_CONFIG:
		return ClassBadConfig
	case pb.ErrorClass_ERROR_CLASS_FAILED_DEVICE:
		return ClassFailedDevice
	case pb.ErrorClass_ERROR_CLASS_PERMANENT:
		return ClassPermanent
	default:
		return ClassUnknown
	}
}

func repairOf(repair pb.DeviceRepair) Repair {
	switch repair {
	case pb.DeviceRepair_DEVICE_REPAIR_RESTART_WORKLOAD:
		return RepairRestartWorkload
	case pb.DeviceRepair_DEVICE_REPAIR_RESET_DEVICE:
		return RepairResetDevice
	case pb.DeviceRepair_DEVICE_REPAIR_RELOAD_DRIVER:
		return RepairReloadDriver
	case pb.DeviceRepair_DEVICE_REPAIR_REBOOT_NODE:
		return RepairRebootNode
	case pb.DeviceRepair_DEVICE_REPAIR_INSPECT_HARDWARE:
		return RepairInspectHardware
	case pb.DeviceRepair_DEVICE_REPAIR_CONTACT_VENDOR:
		return RepairContactVendor
	case pb.DeviceRepair_DEVICE_REPAIR_REPLACE_HARDWARE:
		return RepairReplaceHardware
	default:
		return RepairNone
	}
}
