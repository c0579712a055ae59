// Copyright The drahealth Authors.
// SPDX-License-Identifier: Apache-2.0

// Command go-driver is a DRA driver in Go that gets health, taints and classified errors from the
// drahealth agent of its node. It allocates CPUs and hugepages; see README.md.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"drahealth.example.com/go/drahealth"
)

const version = "v0.1.0"

// options are the settings from the command line.
type options struct {
	driver, node, podUID  string
	kubeletDir, cdiDir    string
	socket                string
	inform                bool
	kubeconfig, apiServer string
	host                  host
}

func parse() options {
	var o options
	hostname, _ := os.Hostname() // the kubelet writes it in lower case in the node's name
	flag.StringVar(&o.driver, "driver-name", "godev.drahealth.example.com", "")
	flag.StringVar(&o.node, "node-name", cmp.Or(os.Getenv("NODE_NAME"), strings.ToLower(hostname)), "node name, which is also the pool of the devices")
	flag.StringVar(&o.podUID, "pod-uid", os.Getenv("POD_UID"),
		"UID of the driver's pod, for rolling updates")
	flag.StringVar(&o.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "")
	flag.StringVar(&o.cdiDir, "cdi-dir", "/var/run/cdi", "")
	flag.StringVar(&o.socket, "drahealth-socket", "",
		"socket of the agent; none: no health service (default /run/drahealth/drivers/<driver name>.sock)")
	flag.BoolVar(&o.inform, "inform", true, "publish taints of effect None; false for Kubernetes 1.34")
	flag.StringVar(&o.kubeconfig, "kubeconfig", "", "")
	flag.StringVar(&o.apiServer, "api-server", "", "URL; default: from the kubeconfig or the pod's service account")
	flag.StringVar(&o.host.sysfs, "sysfs-root", "/sys", "")
	flag.Func("cpus", "CPUs of one device: 0-3, or 4-7@1 for NUMA node 1; may be repeated", o.host.addCPUs)
	flag.Func("hugepages", "hugepages of one device: 2Mi:8, or 1Gi:1@1 for NUMA node 1; may be repeated", o.host.addHugepages)
	klog.InitFlags(nil)
	flag.Parse()
	o.socket = cmp.Or(o.socket, filepath.Join("/run/drahealth/drivers", o.driver+".sock"))
	return o
}

func main() {
	o := parse()
	err := run(o)
	if err != nil {
		klog.ErrorS(err, "Driver failed")
	}
	klog.Flush()
	if err != nil {
		os.Exit(1)
	}
}

// run serves until a signal, then returns nil, or until a fatal error, which it returns.
func run(o options) error {
	stopped, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, fatal := context.WithCancelCause(stopped)
	defer fatal(nil)

	config, err := clientcmd.BuildConfigFromFlags(o.apiServer, o.kubeconfig)
	if err != nil {
		return fmt.Errorf("no API server: %w", err)
	}
	config.QPS = -1 // unlimited: the default limit delays the requests of several claims by 200 ms each
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("no API server: %w", err)
	}
	plugin := filepath.Join(o.kubeletDir, "plugins", o.driver)
	registry := filepath.Join(o.kubeletDir, "plugins_registry")
	for _, directory := range []string{plugin, registry, o.cdiDir} {
		if err := os.MkdirAll(directory, 0o755); err != nil {
			return err
		}
	}

	d := &driver{
		name: o.driver, node: o.node, host: &o.host, cdi: cdiFiles{o.cdiDir, o.driver}, fatal: fatal,
	}
	d.agent, err = drahealth.New(o.driver,
		drahealth.Socket(o.socket),
		drahealth.Version(version),
		drahealth.OnError(d.HandleError),
	)
	if err != nil {
		return err
	}
	defer func() { _ = d.agent.Close() }()
	d.agent.Declare(o.host.declared(o.node)...)

	helper, err := kubeletplugin.Start(ctx, d,
		kubeletplugin.DriverName(o.driver),
		kubeletplugin.NodeName(o.node),
		kubeletplugin.KubeClient(d.agent.KubeClient(client)),
		kubeletplugin.PluginDataDirectoryPath(plugin),
		kubeletplugin.RegistrarDirectoryPath(registry),
		kubeletplugin.RollingUpdate(types.UID(o.podUID)),
		kubeletplugin.HealthService(o.socket != "none"),
	)
	if err != nil {
		return err
	}
	defer helper.Stop()
	klog.InfoS("Serving devices", "driver", o.driver, "devices", len(o.host.devices))

	d.agent.WatchTaints(ctx, func(ctx context.Context, taints drahealth.Taints) error {
		if !o.inform {
			taints = taints.Without(resourceapi.DeviceTaintEffectNone)
		}
		return d.publish(ctx, helper, client, taints)
	})
	if stopped.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}
