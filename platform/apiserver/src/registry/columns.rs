//! The columns of the built-in kinds that have no file of their own for them. Names, types and descriptions are
//! those of kube-apiserver (`kubernetes/pkg/printers/internalversion`).

/// A column of a printed table.
pub(crate) struct Column {
    pub(crate) name: &'static str,
    /// `string`, `integer` or `date`.
    pub(crate) kind: &'static str,
    pub(crate) format: &'static str,
    pub(crate) description: &'static str,
    /// 0 is always shown, 1 with `-o wide`.
    pub(crate) priority: u8,
}

impl Column {
    pub(super) const fn text(name: &'static str, description: &'static str) -> Self {
        Self { name, kind: "string", format: "", description, priority: 0 }
    }
    pub(super) const fn integer(name: &'static str, description: &'static str) -> Self {
        Self { name, kind: "integer", format: "", description, priority: 0 }
    }
    pub(super) const fn boolean(name: &'static str, description: &'static str) -> Self {
        Self { name, kind: "boolean", format: "", description, priority: 0 }
    }
    pub(super) const fn date(name: &'static str, description: &'static str) -> Self {
        Self { name, kind: "date", format: "", description, priority: 0 }
    }
    /// The column's definition in a table.
    pub(crate) fn to_value(&self) -> serde_json::Value {
        serde_json::json!({
            "name": self.name,
            "type": self.kind,
            "format": self.format,
            "description": self.description,
            "priority": self.priority,
        })
    }
    pub(super) const fn wide(self) -> Self {
        Self { priority: 1, ..self }
    }
}

/// The first column of every table.
pub(crate) const NAME: Column = Column {
    name: "Name",
    kind: "string",
    format: "name",
    description: "Name must be unique within a namespace. Is required when creating resources, although some resources may allow a client to request the generation of an appropriate name automatically. Name is primarily intended for creation idempotence and configuration definition. Cannot be updated. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/names#names",
    priority: 0,
};
pub(crate) const AGE: Column = Column::text(
    "Age",
    "CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed to be set in happens-before order across separate operations. Clients may not set this value. It is represented in RFC3339 form and is in UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata",
);

pub(super) const DEPLOYMENT: &[Column] = &[
    NAME,
    Column::text("Ready", "Number of the pod with ready state"),
    Column::text("Up-to-date", "Total number of non-terminated pods targeted by this deployment that have the desired template spec."),
    Column::text("Available", "Total number of available pods (ready for at least minReadySeconds) targeted by this deployment."),
    AGE,
    Column::text("Containers", "Names of each container in the template.").wide(),
    Column::text("Images", "Images referenced by each container in the template.").wide(),
    Column::text("Selector", "Label selector for pods. Existing ReplicaSets whose pods are selected by this will be the ones affected by this deployment.").wide(),
];

pub(super) const STATEFUL_SET: &[Column] = &[
    NAME,
    Column::text("Ready", "Number of the pod with ready state"),
    AGE,
    Column::text("Containers", "Names of each container in the template.").wide(),
    Column::text("Images", "Images referenced by each container in the template.").wide(),
];

pub(super) const DAEMON_SET: &[Column] = &[
    NAME,
    Column::integer("Desired", "The total number of nodes that should be running the daemon pod (including nodes correctly running the daemon pod). More info: https://kubernetes.io/docs/concepts/workloads/controllers/daemonset/"),
    Column::integer("Current", "The number of nodes that are running at least 1 daemon pod and are supposed to run the daemon pod. More info: https://kubernetes.io/docs/concepts/workloads/controllers/daemonset/"),
    Column::integer("Ready", "The number of nodes that should be running the daemon pod and have one or more of the daemon pod running and ready."),
    Column::integer("Up-to-date", "The total number of nodes that are running updated daemon pod"),
    Column::integer("Available", "The number of nodes that should be running the daemon pod and have one or more of the daemon pod running and available (ready for at least spec.minReadySeconds)"),
    Column::text("Node Selector", "NodeSelector is a selector which must be true for the pod to fit on a node. Selector which must match a node's labels for the pod to be scheduled on that node. More info: https://kubernetes.io/docs/concepts/configuration/assign-pod-node/"),
    AGE,
    Column::text("Containers", "Names of each container in the template.").wide(),
    Column::text("Images", "Images referenced by each container in the template.").wide(),
    Column::text("Selector", "A label query over pods that are managed by the daemon set. Must match in order to be controlled. If empty, defaulted to labels on Pod template. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors").wide(),
];

pub(super) const CONTROLLER_REVISION: &[Column] = &[
    NAME,
    Column::text("Controller", "Controller of the object"),
    Column::text("Revision", "revision indicates the revision of the state represented by Data."),
    AGE,
];

pub(super) const HORIZONTAL_POD_AUTOSCALER: &[Column] = &[
    NAME,
    Column::text(
        "Reference",
        "scaleTargetRef points to the target resource to scale, and is used to the pods for which metrics should be collected, as well as to actually change the replica count.",
    ),
    Column::text(
        "Targets",
        "metrics contains the specifications for which to use to calculate the desired replica count (the maximum replica count across all metrics will be used).  The desired replica count is calculated multiplying the ratio between the target value and the current value by the current number of pods.  Ergo, metrics used must decrease as the pod count is increased, and vice-versa.  See the individual metric source types for more information about how each type of metric must respond.",
    ),
    Column::text(
        "MinPods",
        "minReplicas is the lower limit for the number of replicas to which the autoscaler can scale down.  It defaults to 1 pod.  minReplicas is allowed to be 0 if the alpha feature gate HPAScaleToZero is enabled and at least one Object or External metric is configured.  Scaling is active as long as at least one metric value is available.",
    ),
    Column::text(
        "MaxPods",
        "maxReplicas is the upper limit for the number of replicas to which the autoscaler can scale up. It cannot be less that minReplicas.",
    ),
    Column::text(
        "Replicas",
        "currentReplicas is current number of replicas of pods managed by this autoscaler, as last seen by the autoscaler.",
    ),
    AGE,
];

pub(super) const CRON_JOB: &[Column] = &[
    NAME,
    Column::text("Schedule", "The schedule in Cron format, see https://en.wikipedia.org/wiki/Cron."),
    Column::text("Timezone", "The time zone name for the given schedule, see https://en.wikipedia.org/wiki/List_of_tz_database_time_zones. If not specified, this will default to the time zone of the kube-controller-manager process. The set of valid time zone names and the time zone offset is loaded from the system-wide time zone database by the API server during CronJob validation and the controller manager during execution. If no system-wide time zone database can be found a bundled version of the database is used instead. If the time zone name becomes invalid during the lifetime of a CronJob or due to a change in host configuration, the controller will stop creating new new Jobs and will create a system event with the reason UnknownTimeZone. More information can be found in https://kubernetes.io/docs/concepts/workloads/controllers/cron-jobs/#time-zones"),
    Column::boolean("Suspend", "This flag tells the controller to suspend subsequent executions, it does not apply to already started executions.  Defaults to false."),
    Column::integer("Active", "A list of pointers to currently running jobs."),
    Column::text("Last Schedule", "Information when was the last time the job was successfully scheduled."),
    AGE,
    Column::text("Containers", "Names of each container in the template.").wide(),
    Column::text("Images", "Images referenced by each container in the template.").wide(),
    Column::text("Selector", "A label query over pods that should match the pod count. Normally, the system sets this field for you. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors").wide(),
];

pub(super) const SERVICE_ACCOUNT: &[Column] = &[
    NAME,
    Column::text(
        "Secrets",
        "Secrets is a list of the secrets in the same namespace that pods running using this ServiceAccount are allowed to use. Pods are only limited to this list if this service account has a \"kubernetes.io/enforce-mountable-secrets\" annotation set to \"true\". This field should not be used to find auto-generated service account token secrets for use outside of pods. Instead, tokens can be requested directly using the TokenRequest API, or service account token secrets can be manually created. More info: https://kubernetes.io/docs/concepts/configuration/secret",
    ),
    AGE,
];

pub(super) const RESOURCE_QUOTA: &[Column] = &[
    NAME,
    AGE,
    Column::text(
        "Request",
        "Request represents a minimum amount of cpu/memory that a container may consume.",
    ),
    Column::text(
        "Limit",
        "Limits control the maximum amount of cpu/memory that a container may use independent of contention on the node.",
    ),
];

pub(super) const PERSISTENT_VOLUME_CLAIM: &[Column] = &[
    NAME,
    Column::text("Status", "phase represents the current phase of PersistentVolumeClaim."),
    Column::text("Volume", "volumeName is the binding reference to the PersistentVolume backing this claim."),
    Column::text("Capacity", "capacity represents the actual resources of the underlying volume."),
    Column::text("Access Modes", "accessModes contains the actual access modes the volume backing the PVC has. More info: https://kubernetes.io/docs/concepts/storage/persistent-volumes#access-modes-1"),
    Column::text("StorageClass", "StorageClass of the pvc"),
    AGE,
    Column::text("VolumeMode", "volumeMode defines what type of volume is required by the claim. Value of Filesystem is implied when not included in claim spec.").wide(),
];

pub(super) const PERSISTENT_VOLUME: &[Column] = &[
    NAME,
    Column::text("Capacity", "capacity is the description of the persistent volume's resources and capacity. More info: https://kubernetes.io/docs/concepts/storage/persistent-volumes#capacity"),
    Column::text("Access Modes", "accessModes contains all ways the volume can be mounted. More info: https://kubernetes.io/docs/concepts/storage/persistent-volumes#access-modes"),
    Column::text("Reclaim Policy", "persistentVolumeReclaimPolicy defines what happens to a persistent volume when released from its claim. Valid options are Retain (default for manually created PersistentVolumes), Delete (default for dynamically provisioned PersistentVolumes), and Recycle (deprecated). Recycle must be supported by the volume plugin underlying this PersistentVolume. More info: https://kubernetes.io/docs/concepts/storage/persistent-volumes#reclaiming"),
    Column::text("Status", "phase indicates if a volume is available, bound to a claim, or released by a claim. More info: https://kubernetes.io/docs/concepts/storage/persistent-volumes#phase"),
    Column::text("Claim", "claimRef is part of a bi-directional binding between PersistentVolume and PersistentVolumeClaim. Expected to be non-nil when bound. claim.VolumeName is the authoritative bind between PV and PVC. More info: https://kubernetes.io/docs/concepts/storage/persistent-volumes#binding"),
    Column::text("StorageClass", "StorageClass of the pv"),
    Column::text("Reason", "reason is a brief CamelCase string that describes any failure and is meant for machine parsing and tidy display in the CLI."),
    AGE,
    Column::text("VolumeMode", "volumeMode defines if a volume is intended to be used with a formatted filesystem or to remain in raw block state. Value of Filesystem is implied when not included in spec.").wide(),
];

pub(super) const REPLICATION_CONTROLLER: &[Column] = &[
    NAME,
    Column::integer("Desired", "Replicas is the number of desired replicas. This is a pointer to distinguish between explicit zero and unspecified. Defaults to 1. More info: https://kubernetes.io/docs/concepts/workloads/controllers/replicationcontroller#what-is-a-replicationcontroller"),
    Column::integer("Current", "Replicas is the most recently observed number of replicas. More info: https://kubernetes.io/docs/concepts/workloads/controllers/replicationcontroller#what-is-a-replicationcontroller"),
    Column::integer("Ready", "The number of ready replicas for this replication controller."),
    AGE,
    Column::text("Containers", "Names of each container in the template.").wide(),
    Column::text("Images", "Images referenced by each container in the template.").wide(),
    Column::text("Selector", "Selector is a label query over pods that should match the Replicas count. If Selector is empty, it is defaulted to the labels present on the Pod template. Label keys and values that must match in order to be controlled by this replication controller, if empty defaulted to labels on Pod template. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors").wide(),
];

pub(super) const ENDPOINT_SLICE: &[Column] = &[
    NAME,
    Column::text(
        "AddressType",
        "addressType specifies the type of address carried by this EndpointSlice. All addresses in this slice must be the same type. This field is immutable after creation. The following address types are currently supported: * IPv4: Represents an IPv4 Address. * IPv6: Represents an IPv6 Address. * FQDN: Represents a Fully Qualified Domain Name.",
    ),
    Column::text(
        "Ports",
        "ports specifies the list of network ports exposed by each endpoint in this slice. Each port must have a unique name. When ports is empty, it indicates that there are no defined ports. When a port is defined with a nil port value, it indicates \"all ports\". Each slice may include a maximum of 100 ports.",
    ),
    Column::text(
        "Endpoints",
        "endpoints is a list of unique endpoints in this slice. Each slice may include a maximum of 1000 endpoints.",
    ),
    AGE,
];

pub(super) const NETWORK_POLICY: &[Column] = &[
    NAME,
    Column::text(
        "Pod-Selector",
        "Selects the pods to which this NetworkPolicy object applies.  The array of ingress rules is applied to any pods selected by this field. Multiple network policies can select the same set of pods.  In this case, the ingress rules for each are combined additively. This field is NOT optional and follows standard label selector semantics. An empty podSelector matches all pods in this namespace.",
    ),
    AGE,
];

pub(super) const INGRESS: &[Column] = &[
    NAME,
    Column::text(
        "Class",
        "The name of the IngressClass resource that should be used for additional configuration",
    ),
    Column::text("Hosts", "Hosts that incoming requests are matched against before the ingress rule"),
    Column::text("Address", "Address is a list containing ingress points for the load-balancer"),
    Column::text("Ports", "Ports of TLS configurations that open"),
    AGE,
];

pub(super) const INGRESS_CLASS: &[Column] = &[
    NAME,
    Column::text("Controller", "Controller that is responsible for handling this class"),
    Column::text("Parameters", "A reference to a resource with additional parameters"),
    AGE,
];

const WEBHOOKS: Column =
    Column::integer("Webhooks", "Webhooks indicates the number of webhooks registered in this configuration");

pub(super) const WEBHOOK_CONFIGURATION: &[Column] = &[NAME, WEBHOOKS, AGE];

pub(super) const RUNTIME_CLASS: &[Column] = &[NAME, Column::text("Handler", ""), AGE];

pub(super) const ROLE: &[Column] = &[
    NAME,
    Column::date(
        "Created At",
        "CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed to be set in happens-before order across separate operations. Clients may not set this value. It is represented in RFC3339 form and is in UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata",
    ),
];

pub(super) const ROLE_BINDING: &[Column] = &[
    NAME,
    Column::text(
        "Role",
        "RoleRef can reference a Role in the current namespace or a ClusterRole in the global namespace. If the RoleRef cannot be resolved, the Authorizer must return an error.",
    ),
    AGE,
    Column::text("Users", "Users in the roleBinding").wide(),
    Column::text("Groups", "Groups in the roleBinding").wide(),
    Column::text("ServiceAccounts", "ServiceAccounts in the roleBinding").wide(),
];

pub(super) const CLUSTER_ROLE: &[Column] = &[
    NAME,
    Column::date(
        "Created At",
        "CreationTimestamp is a timestamp representing the server time when this object was created. It is not guaranteed to be set in happens-before order across separate operations. Clients may not set this value. It is represented in RFC3339 form and is in UTC.\n\nPopulated by the system. Read-only. Null for lists. More info: https://git.k8s.io/community/contributors/devel/sig-architecture/api-conventions.md#metadata",
    ),
];

pub(super) const CLUSTER_ROLE_BINDING: &[Column] = &[
    NAME,
    Column::text(
        "Role",
        "RoleRef can only reference a ClusterRole in the global namespace. If the RoleRef cannot be resolved, the Authorizer must return an error.",
    ),
    AGE,
    Column::text("Users", "Users in the clusterRoleBinding").wide(),
    Column::text("Groups", "Groups in the clusterRoleBinding").wide(),
    Column::text("ServiceAccounts", "ServiceAccounts in the clusterRoleBinding").wide(),
];

pub(super) const PRIORITY_CLASS: &[Column] = &[
    NAME,
    Column::integer(
        "Value",
        "value represents the integer value of this priority class. This is the actual priority that pods receive when they have the name of this class in their pod spec.",
    ),
    Column::boolean(
        "Global-Default",
        "globalDefault specifies whether this PriorityClass should be considered as the default priority for pods that do not have any priority class. Only one PriorityClass can be marked as `globalDefault`. However, if more than one PriorityClasses exists with their `globalDefault` field set to true, the smallest value of such global default PriorityClasses will be used as the default priority.",
    ),
    AGE,
];

pub(super) const SERVICE: &[Column] = &[
    NAME,
    Column::text("Type", "type determines how the Service is exposed. Defaults to ClusterIP. Valid options are ExternalName, ClusterIP, NodePort, and LoadBalancer. \"ClusterIP\" allocates a cluster-internal IP address for load-balancing to endpoints. Endpoints are determined by the selector or if that is not specified, by manual construction of an Endpoints object or EndpointSlice objects. If clusterIP is \"None\", no virtual IP is allocated and the endpoints are published as a set of endpoints rather than a virtual IP. \"NodePort\" builds on ClusterIP and allocates a port on every node which routes to the same endpoints as the clusterIP. \"LoadBalancer\" builds on NodePort and creates an external load-balancer (if supported in the current cloud) which routes to the same endpoints as the clusterIP. \"ExternalName\" aliases this service to the specified externalName. Several other fields do not apply to ExternalName services. More info: https://kubernetes.io/docs/concepts/services-networking/service/#publishing-services-service-types"),
    Column::text("Cluster-IP", "clusterIP is the IP address of the service and is usually assigned randomly. If an address is specified manually, is in-range (as per system configuration), and is not in use, it will be allocated to the service; otherwise creation of the service will fail. This field may not be changed through updates unless the type field is also being changed to ExternalName (which requires this field to be blank) or the type field is being changed from ExternalName (in which case this field may optionally be specified, as describe above).  Valid values are \"None\", empty string (\"\"), or a valid IP address. Setting this to \"None\" makes a \"headless service\" (no virtual IP), which is useful when direct endpoint connections are preferred and proxying is not required.  Only applies to types ClusterIP, NodePort, and LoadBalancer. If this field is specified when creating a Service of type ExternalName, creation will fail. This field will be wiped when updating a Service to type ExternalName. More info: https://kubernetes.io/docs/concepts/services-networking/service/#virtual-ips-and-service-proxies"),
    Column::text("External-IP", "externalIPs is a list of IP addresses for which nodes in the cluster will also accept traffic for this service.  These IPs are not managed by Kubernetes.  The user is responsible for ensuring that traffic arrives at a node with this IP.  A common example is external load-balancers that are not part of the Kubernetes system."),
    Column::text("Port(s)", "The list of ports that are exposed by this service. More info: https://kubernetes.io/docs/concepts/services-networking/service/#virtual-ips-and-service-proxies"),
    AGE,
    Column::text("Selector", "Route service traffic to pods with label keys and values matching this selector. If empty or not present, the service is assumed to have an external process managing its endpoints, which Kubernetes will not modify. Only applies to types ClusterIP, NodePort, and LoadBalancer. Ignored if type is ExternalName. More info: https://kubernetes.io/docs/concepts/services-networking/service/").wide(),
];

pub(super) const STORAGE_CLASS: &[Column] = &[
    NAME,
    Column::text("Provisioner", "provisioner indicates the type of the provisioner."),
    Column::text(
        "ReclaimPolicy",
        "reclaimPolicy controls the reclaimPolicy for dynamically provisioned PersistentVolumes of this storage class. Defaults to Delete.",
    ),
    Column::text(
        "VolumeBindingMode",
        "volumeBindingMode indicates how PersistentVolumeClaims should be provisioned and bound.  When unset, VolumeBindingImmediate is used. This field is only honored by servers that enable the VolumeScheduling feature.",
    ),
    Column::text(
        "AllowVolumeExpansion",
        "allowVolumeExpansion shows whether the storage class allow volume expand.",
    ),
    AGE,
];

pub(super) const CSINODE: &[Column] = &[
    NAME,
    Column::integer("Drivers", "Drivers indicates the number of CSI drivers registered on the node"),
    AGE,
];

pub(super) const VOLUME_ATTACHMENT: &[Column] = &[
    NAME,
    Column {
        format: "name",
        ..Column::text(
            "Attacher",
            "attacher indicates the name of the volume driver that MUST handle this request. This is the name returned by GetPluginName().",
        )
    },
    Column::text("PV", "persistentVolumeName represents the name of the persistent volume to attach."),
    Column::text("Node", "nodeName represents the node that the volume should be attached to."),
    Column::boolean(
        "Attached",
        "attached indicates the volume is successfully attached. This field must only be set by the entity completing the attach operation, i.e. the external-attacher.",
    ),
    AGE,
];

pub(super) const POD: &[Column] = &[
    NAME,
    Column::text("Ready", "The aggregate readiness state of this pod for accepting traffic."),
    Column::text("Status", "The aggregate status of the containers in this pod."),
    Column::text("Restarts", "The number of times the containers in this pod have been restarted and when the last container in this pod has restarted."),
    AGE,
    Column::text("IP", "podIP address allocated to the pod. Routable at least within the cluster. Empty if not yet allocated.").wide(),
    Column::text("Node", "NodeName is a request to schedule this pod onto a specific node. If it is non-empty, the scheduler simply schedules this pod onto that node, assuming that it fits resource requirements.").wide(),
    Column::text("Nominated Node", "nominatedNodeName is set only when this pod preempts other pods on the node, but it cannot be scheduled right away as preemption victims receive their graceful termination periods. This field does not guarantee that the pod will be scheduled on this node. Scheduler may decide to place the pod elsewhere if other nodes become available sooner. Scheduler may also decide to give the resources on this node to a higher priority pod that is created after preemption. As a result, this field may be different than PodSpec.nodeName when the pod is scheduled.").wide(),
    Column::text("Readiness Gates", "If specified, all readiness gates will be evaluated for pod readiness. A pod is ready when all its containers are ready AND all conditions specified in the readiness gates have status equal to \"True\" More info: https://git.k8s.io/enhancements/keps/sig-network/580-pod-readiness-gates").wide(),
];

pub(super) const REPLICA_SET: &[Column] = &[
    NAME,
    Column::integer("Desired", "Replicas is the number of desired replicas. This is a pointer to distinguish between explicit zero and unspecified. Defaults to 1. More info: https://kubernetes.io/docs/concepts/workloads/controllers/replicationcontroller/#what-is-a-replicationcontroller"),
    Column::integer("Current", "Replicas is the most recently observed number of replicas. More info: https://kubernetes.io/docs/concepts/workloads/controllers/replicationcontroller/#what-is-a-replicationcontroller"),
    Column::integer("Ready", "The number of ready replicas for this replica set."),
    AGE,
    Column::text("Containers", "Names of each container in the template.").wide(),
    Column::text("Images", "Images referenced by each container in the template.").wide(),
    Column::text("Selector", "Selector is a label query over pods that should match the replica count. If the selector is empty, it is defaulted to the labels present on the pod template. Label keys and values that must match in order to be controlled by this replica set. More info: https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors").wide(),
];

pub(super) const CONFIG_MAP: &[Column] = &[
    NAME,
    Column::text(
        "Data",
        "Data contains the configuration data. Each key must consist of alphanumeric characters, '-', '_' or '.'. Values with non-UTF-8 byte sequences must use the BinaryData field. The keys stored in Data must not overlap with the keys in the BinaryData field, this is enforced during validation process.",
    ),
    AGE,
];

pub(super) const SECRET: &[Column] = &[
    NAME,
    Column::text(
        "Type",
        "Used to facilitate programmatic handling of secret data. More info: https://kubernetes.io/docs/concepts/configuration/secret/#secret-types",
    ),
    Column::text(
        "Data",
        "Data contains the secret data. Each key must consist of alphanumeric characters, '-', '_' or '.'. The serialized form of the secret data is a base64 encoded string, representing the arbitrary (possibly non-string) data value here. Described in https://tools.ietf.org/html/rfc4648#section-4",
    ),
    AGE,
];
