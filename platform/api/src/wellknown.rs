//! Labels, annotations, names and ports that several parts must agree on.

/// On every object made for a function: the function's name.
pub const LABEL_FUNCTION: &str = "mayfly.dev/function";
/// On a revision's ReplicaSet and pods: the revision's name.
pub const LABEL_REVISION: &str = "mayfly.dev/revision";
/// On a workflow's executions, and on Jobs that they run: the workflow's name.
pub const LABEL_WORKFLOW: &str = "mayfly.dev/workflow";
/// Upstream's label that every namespace carries.
pub const LABEL_NAMESPACE_NAME: &str = "kubernetes.io/metadata.name";
pub const LABEL_HOSTNAME: &str = "kubernetes.io/hostname";
pub const LABEL_OS: &str = "kubernetes.io/os";
pub const LABEL_ARCH: &str = "kubernetes.io/arch";
/// On a node: the runtimes it carries, one label each (`runtime.mayfly.dev/wasm: "true"`).
pub const LABEL_RUNTIME_PREFIX: &str = "runtime.mayfly.dev/";
/// The value of such a label for the runtime of pods without a `runtimeClassName`: ordinary containers.
pub const RUNTIME_OCI: &str = "oci";

/// On a Function: the number of the newest revision, so that names are not reused.
pub const ANNOTATION_GENERATION: &str = "mayfly.dev/revision-generation";

/// On an Ingress: `"true"` if its functions are components of a Spin application, which read their route from headers.
pub const ANNOTATION_SPIN_ROUTES: &str = "mayfly.dev/spin-routes";

/// On a pod of wasm components: destinations that they may call, separated by commas, as in a function's
/// `spec.egress`.
pub const ANNOTATION_EGRESS: &str = "mayfly.dev/egress";
/// The object last applied by `kubectl apply` (not `--server-side`), as JSON text.
pub const ANNOTATION_LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";

/// `spec.runtimeClassName` of pods for the wasm host.
pub const RUNTIME_CLASS_WASM: &str = "wasm";
/// `spec.runtimeClassName` of pods whose containers are batch jobs of a Slurm cluster.
pub const RUNTIME_CLASS_SLURM: &str = "slurm";
/// A wasm pod's container image names its component: this, then the digest without `sha256:`. The digest alone is
/// understood, too ([`crate::component_of_image`]).
pub const COMPONENT_IMAGE_PREFIX: &str = "component.mayfly.dev/sha256@sha256:";
/// The one container of a function's pod.
pub const FUNCTION_CONTAINER: &str = "function";
/// The port a function's pod listens on.
pub const FUNCTION_PORT: u16 = 8080;

/// Namespaces that always exist.
pub const NAMESPACE_DEFAULT: &str = "default";
pub const NAMESPACE_SYSTEM: &str = "kube-system";
pub const NAMESPACE_NODE_LEASE: &str = "kube-node-lease";
pub const NAMESPACE_PUBLIC: &str = "kube-public";

/// The suffix of a function's own host: `<name>.<namespace>.fn.localhost`.
pub const FUNCTION_HOST_SUFFIX: &str = ".fn.localhost";
/// The prefix of a function's path: `/fn/<namespace>/<name>/…`.
pub const FUNCTION_PATH_PREFIX: &str = "/fn/";
