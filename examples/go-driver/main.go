// Command go-driver is a DRA driver in Go that gets health, taints and judged errors from the
// drahealth agent of its node. It hands out CPUs and hugepages. README.md says how.
package main

import (
	"cmp"
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/klog/v2"

	"drahealth.example.com/go-driver/drahealth"
)

const (
	version = "v0.1.0"
	// firstTaints is how long the first ResourceSlices wait for the agent, which knows what was
	// tainted before.
	firstTaints = 5 * time.Second
)

// options are what the program can be told.
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
	hostname, _ := os.Hostname()
	flag.StringVar(&o.driver, "driver-name", "godev.drahealth.example.com", "")
	flag.StringVar(&o.node, "node-name", cmp.Or(os.Getenv("NODE_NAME"), hostname), "pool of its devices")
	flag.StringVar(&o.podUID, "pod-uid", os.Getenv("POD_UID"),
		"of its pod, so that a new one can take over from an old one")
	flag.StringVar(&o.kubeletDir, "kubelet-dir", "/var/lib/kubelet", "")
	flag.StringVar(&o.cdiDir, "cdi-dir", "/var/run/cdi", "")
	flag.StringVar(&o.socket, "drahealth-socket", "",
		"of the agent; none: no health (default /run/drahealth/drivers/<driver name>.sock)")
	flag.BoolVar(&o.inform, "inform", true, "publish taints of effect None; false for Kubernetes 1.34")
	flag.StringVar(&o.kubeconfig, "kubeconfig", "", "")
	flag.StringVar(&o.apiServer, "api-server", "", "URL; default: as in the kubeconfig, or as a pod is told")
	flag.StringVar(&o.host.sysfs, "sysfs-root", "/sys", "")
	flag.Func("cpus", "a device of CPUs, such as 0-3 or 4-7@1, of NUMA node 1; may be repeated", o.host.addCPUs)
	flag.Func("hugepages", "a device of pages, such as 2Mi:8 or 1Gi:1@1; may be repeated", o.host.addHugepages)
	klog.InitFlags(nil)
	flag.Parse()
	o.socket = cmp.Or(o.socket, filepath.Join("/run/drahealth/drivers", o.driver+".sock"))
	return o
}

func main() {
	o := parse()
	err := run(o)
	if err != nil {
		klog.ErrorS(err, "Ended")
	}
	klog.Flush()
	if err != nil {
		os.Exit(1)
	}
}

// run ends with nil when it is told to, with an error when it cannot go on.
func run(o options) error {
	asked, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	ctx, fatal := context.WithCancelCause(asked)
	defer fatal(nil)

	config, err := clientcmd.BuildConfigFromFlags(o.apiServer, o.kubeconfig)
	if err != nil {
		return fmt.Errorf("no API server: %w", err)
	}
	config.QPS = -1 // each claim is asked for: by default that waits for one turn in 200 ms
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
	d.agent = drahealth.New(o.driver,
		drahealth.Socket(o.socket),
		drahealth.Version(version),
		drahealth.OnError(d.HandleError),
	)
	defer d.agent.Close()
	d.agent.Declare(o.host.declared(o.node)...)

	helper, err := kubeletplugin.Start(ctx, d,
		kubeletplugin.DriverName(o.driver),
		kubeletplugin.NodeName(o.node),
		kubeletplugin.KubeClient(client),
		kubeletplugin.PluginDataDirectoryPath(plugin),
		kubeletplugin.RegistrarDirectoryPath(registry),
		kubeletplugin.RollingUpdate(types.UID(o.podUID)),
		kubeletplugin.HealthService(o.socket != "none"),
	)
	if err != nil {
		return err
	}
	defer helper.Stop()
	klog.InfoS("Handing out", "driver", o.driver, "devices", len(o.host.devices))

	d.publishTaints(ctx, helper, o.inform)
	if asked.Err() != nil {
		return nil
	}
	return context.Cause(ctx)
}

// publishTaints publishes the ResourceSlices, and again whenever their taints change, until ctx is
// done.
func (d *driver) publishTaints(ctx context.Context, helper *kubeletplugin.Helper, inform bool) {
	var mu sync.Mutex
	told := false
	// Slices of an earlier life may say that a device is broken. To publish them without taints
	// before the agent had its say would take that back; but a node without an agent has devices,
	// too.
	late := time.AfterFunc(firstTaints, func() {
		mu.Lock()
		defer mu.Unlock()
		if !told {
			d.publish(ctx, helper, nil)
		}
	})
	defer late.Stop()
	d.agent.WatchTaints(ctx, func(taints drahealth.Taints) {
		mu.Lock()
		defer mu.Unlock()
		told = true
		if !inform {
			taints = taints.Without(resourceapi.DeviceTaintEffectNone)
		}
		d.publish(ctx, helper, taints)
	})
}
