// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

package drahealth

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"k8s.io/dynamic-resource-allocation/kubeletplugin"
)

const (
	// noAnswer is the prefix of each device's message while the agent is absent.
	noAnswer = "drahealth agent does not answer: "
	// firstAnswer limits the wait for a first list: the agent may take two seconds to evaluate a new
	// declaration.
	firstAnswer = 3 * time.Second
	// repeatMax is the longest pause before Unknown devices are reported again.
	repeatMax = 10 * time.Second
	// wholeList limits the time between the first and the last message of one list.
	wholeList = time.Second
	// hostCPU is the prefix of the names of the host's CPUs, which every list of all host devices has.
	hostCPU = "cpu-node"
)

// relay decides which health lists the kubelet gets, and when. It has no I/O and reads no clock.
//
// The agent reports each device three times within its lease, so an agent that sends nothing for half
// of the smallest lease hangs, even if its stream is open. Then all known devices become Unknown. That
// is repeated: when a lease expires, the kubelet drops the reason, and its helper calls HandleError
// after a lease without a report.
//
// An agent whose core hangs while its server works sends its last list to every new stream. So after a
// silence the first list of a stream, which may have several messages, is held back until a later
// message shows that the agent works.
//
// Until the agent has a declaration of the driver, for example after a refusal, it reports the host's devices. These
// are not the driver's, not even a gpu-0 of the same name, which can be another GPU.
type relay struct {
	outage  string                   // reason why devices are Unknown; empty while the agent answers
	leases  map[device]time.Duration // by device, for all devices ever reported
	listed  map[device]time.Duration // lease by device, for the devices on this stream
	host    bool                     // this stream has the host's devices, which are not the driver's
	began   time.Time                // time of the first list of this stream
	lease   time.Duration            // smallest lease on this stream; 0: no list yet
	quiet   time.Time                // time of the last list
	again   time.Time                // time of the next repetition of Unknown
	doubted bool                     // the agent was silent and has sent only a first list since
	kept    [][]kubeletplugin.DeviceHealth
}

func newRelay(now time.Time) *relay {
	return &relay{leases: map[device]time.Duration{}, listed: map[device]time.Duration{}, quiet: now}
}

// silent returns the time at which the agent counts as silent.
func (s *relay) silent() time.Time {
	if s.outage == "" && s.lease == 0 {
		return s.quiet.Add(firstAnswer)
	}
	return s.quiet.Add(cmp.Or(s.lease, defaultLease) / 2)
}

// due returns the time to call waited if no list arrives before.
func (s *relay) due() time.Time {
	if s.outage != "" && s.again.Before(s.silent()) {
		return s.again
	}
	return s.silent()
}

// received handles a list of the agent. Like lost and waited, it returns the lists for the kubelet, which may be empty.
func (s *relay) received(got list, declared *declaration, now time.Time) [][]kubeletplugin.DeviceHealth {
	if got.first {
		s.began, s.listed, s.host = now, map[device]time.Duration{}, false
	}
	for _, reported := range got.devices {
		key := device{reported.PoolName, reported.DeviceName}
		s.listed[key] = reported.HealthCheckTimeout
		s.host = s.host || strings.HasPrefix(key.name, hostCPU) && !declared.has(key)
	}
	// The agent may not have evaluated a declaration that it has accepted: the first list can be older.
	s.host = s.host && (got.first || !declared.accepted.Load())
	if s.host {
		got.devices = nil
	}
	for _, reported := range got.devices {
		s.leases[device{reported.PoolName, reported.DeviceName}] = reported.HealthCheckTimeout
	}
	s.lease = s.smallestLease(declared)
	s.quiet = now
	lists := append(s.kept, got.devices)
	if s.doubted && now.Sub(s.began) < wholeList {
		s.kept = lists
		return nil
	}
	s.outage, s.doubted, s.kept = "", false, nil
	return lists
}

// hide makes the devices of lists Unknown that have checks which the agent does not know. It adds those that the agent
// has not listed on this stream, because it may have refused them.
func (s *relay) hide(lists [][]kubeletplugin.DeviceHealth, hidden map[device]bool, now time.Time) {
	if len(lists) == 0 {
		return
	}
	for _, devices := range lists {
		for at := range devices {
			entry := &devices[at] // a device that was declared without a pool has the node's name as pool
			known := hidden[device{entry.PoolName, entry.DeviceName}] || hidden[device{"", entry.DeviceName}]
			if known && entry.Health == kubeletplugin.HealthStatusHealthy {
				entry.Health, entry.Message = kubeletplugin.HealthStatusUnknown, noChecks
			}
		}
	}
	last := &lists[len(lists)-1]
	for key := range hidden {
		if _, listed := s.listed[key]; key.pool != "" && (s.host || !listed) {
			s.leases[key] = cmp.Or(s.lease, defaultLease) // lists come three times within s.lease
			*last = append(*last, kubeletplugin.DeviceHealth{
				PoolName: key.pool, DeviceName: key.name, Health: kubeletplugin.HealthStatusUnknown,
				LastUpdated: now, HealthCheckTimeout: s.leases[key], Message: noChecks,
			})
		}
	}
}

// lost handles the end of a stream. During an outage it changes nothing; the first reason stays.
func (s *relay) lost(reason string, declared *declaration, now time.Time) [][]kubeletplugin.DeviceHealth {
	s.quiet, s.kept = now, nil
	if s.outage != "" {
		return nil
	}
	s.outage = reason
	return s.unknown(declared, now)
}

// waited handles a time without lists until due. hangs: the connection should be closed.
func (s *relay) waited(declared *declaration, now time.Time) (_ [][]kubeletplugin.DeviceHealth, hangs bool) {
	if !now.Before(s.silent()) {
		s.quiet = now
		switch {
		case declared != nil && len(declared.devices) == 0: // without devices the agent sends no lists
			s.outage = ""
			clear(s.leases)
		case s.outage != "":
			hangs = true
		case s.lease == 0:
			s.outage = noAnswer + "no health list received yet"
		default:
			s.outage, s.doubted, hangs = noAnswer+"it is silent", true, true
		}
	}
	if s.outage == "" {
		return nil, false
	}
	return s.unknown(declared, now), hangs
}

// busy excludes the time for which the kubelet did not read, and the agent's lists were not received.
func (s *relay) busy(time time.Duration) { s.quiet = s.quiet.Add(time) }

// unknown returns all devices that the kubelet may have a state of, as Unknown.
func (s *relay) unknown(declared *declaration, now time.Time) [][]kubeletplugin.DeviceHealth {
	if declared != nil {
		for _, known := range declared.devices {
			key := device{known.GetPool(), known.GetName()}
			if _, reported := s.leases[key]; !reported && key.pool != "" {
				s.leases[key] = cmp.Or(seconds(known.GetLeaseS()), defaultLease) // a lease that changes is a change
			}
		}
	}
	pause := repeatMax
	var devices []kubeletplugin.DeviceHealth
	for key, lease := range s.leases {
		pause = min(pause, cmp.Or(lease, defaultLease)/3)
		devices = append(devices, kubeletplugin.DeviceHealth{
			PoolName:           key.pool,
			DeviceName:         key.name,
			Health:             kubeletplugin.HealthStatusUnknown,
			LastUpdated:        now,
			HealthCheckTimeout: lease,
			Message:            s.outage,
		})
	}
	s.again = now.Add(pause)
	if devices == nil {
		return nil
	}
	slices.SortFunc(devices, func(a, b kubeletplugin.DeviceHealth) int {
		return cmp.Or(cmp.Compare(a.PoolName, b.PoolName), cmp.Compare(a.DeviceName, b.DeviceName))
	})
	return [][]kubeletplugin.DeviceHealth{devices}
}

// smallestLease returns the smallest lease of the declared devices on this stream, else of all devices on it: the
// agent omits a device that is no longer declared, and then lists only come at the pace of the others.
func (s *relay) smallestLease(declared *declaration) (smallest time.Duration) {
	for key, lease := range s.listed {
		if declared.has(key) {
			smallest = smaller(smallest, lease)
		}
	}
	if smallest == 0 && declared != nil {
		return s.smallestLease(nil)
	}
	return smallest
}

// smaller returns the smaller of two leases; known is 0 if there is none yet.
func smaller(known, lease time.Duration) time.Duration {
	lease = cmp.Or(lease, defaultLease)
	return min(cmp.Or(known, lease), lease)
}
