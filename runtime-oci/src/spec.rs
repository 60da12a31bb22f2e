//! Builds the OCI runtime specification of a container; pure functions.
//!
//! The defaults are the common ones (of containerd and Docker): the capability set, the masked paths, the devices.

mod capabilities;
mod devices;
#[cfg(test)]
pub(crate) mod fixtures;
mod resources;
mod seccomp;
mod user;

use std::path::{Path, PathBuf};

use mayfly_runtime::{
    ContainerHook, ContainerSpec, HookMoment, Mount, MountPropagation, SandboxHost, SeccompProfile,
};
use oci_spec::{image::ImageConfiguration, runtime::Spec};
use serde_json::{Value, json};

pub(crate) use capabilities::{bounding_set, oom_score_min};
pub(crate) use user::{ProcessUser, non_root_refusal, user};
use {crate::shared_memory, capabilities::capabilities, resources::resources};

const MASKED_PATHS: [&str; 11] = [
    "/proc/acpi",
    "/proc/asound",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
];
const READ_ONLY_PATHS: [&str; 5] = ["/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"];
const DEFAULT_PATH: &str = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Node and sandbox state that the specification of a container depends on.
#[derive(Clone, Debug)]
pub(crate) struct SpecContext<'a> {
    pub(crate) host: &'a SandboxHost,
    /// The directory of the pinned namespaces.
    pub(crate) namespaces: PathBuf,
    /// The directory of the pod's `hosts`, `hostname` and `resolv.conf`.
    pub(crate) pod_folder: PathBuf,
    /// The pod's own `/dev/shm`.
    pub(crate) shared_memory: PathBuf,
    /// The file of the termination message.
    pub(crate) message_file: PathBuf,
    pub(crate) cgroup: String,
    pub(crate) user: ProcessUser,
    /// The content of the seccomp profile that the container names.
    pub(crate) seccomp_profile: Option<String>,
    /// The host's process id of the process whose PID namespace the container joins.
    pub(crate) target_pid: Option<u32>,
    /// The capabilities that a container may have, as a bit set by number.
    pub(crate) bounding_set: u64,
    /// The lowest `oom_score_adj` that this process may set.
    pub(crate) oom_score_min: i32,
    /// Whether the kernel limits the swap of a cgroup.
    pub(crate) limits_swap: bool,
}

/// Builds the specification.
///
/// # Errors
/// The container's options are invalid; the text is for users.
pub(crate) fn build(
    container: &ContainerSpec,
    image: &ImageConfiguration,
    context: &SpecContext<'_>,
) -> Result<Spec, String> {
    let security = &container.process.security;
    let value = json!({
        "ociVersion": "1.0.2",
        "process": process(container, image, context)?,
        "root": {"path": "rootfs", "readonly": security.read_only_root},
        "hostname": "",
        "mounts": mounts(container, context),
        "linux": linux(container, context)?,
        "hooks": hooks(&container.process.hooks),
    });
    serde_json::from_value(value).map_err(|error| error.to_string())
}

fn hooks(hooks: &[ContainerHook]) -> Value {
    let at = |moment: HookMoment| -> Vec<Value> {
        let of_moment = hooks.iter().filter(|hook| hook.moment == moment);
        let entry = |hook: &ContainerHook| json!({"path": hook.path, "args": hook.args, "env": hook.env, "timeout": hook.timeout_s});
        of_moment.map(entry).collect()
    };
    let moments = HookMoment::ALL.into_iter().map(|moment| (moment.name().to_owned(), at(moment)));
    moments.filter(|(_, hooks)| !hooks.is_empty()).map(|(name, hooks)| (name, Value::Array(hooks))).collect()
}

fn process(
    container: &ContainerSpec,
    image: &ImageConfiguration,
    context: &SpecContext<'_>,
) -> Result<Value, String> {
    let config = image.config().as_ref();
    let arguments = arguments(container, image)?;
    let from_image = config.and_then(|config| config.env().clone()).unwrap_or_default();
    let working_dir = container.process.working_dir.clone().filter(|path| !path.is_empty());
    let working_dir = working_dir
        .or_else(|| config.and_then(|config| config.working_dir().clone()))
        .filter(|path| !path.is_empty());
    let capabilities = capabilities(&container.process.security, context.bounding_set);
    let ProcessUser { uid, gid, groups } = &context.user;
    // A process that is not root gets capabilities only by executing a file that has them.
    let effective = if *uid == 0 { capabilities.clone() } else { Vec::new() };
    Ok(json!({
        "terminal": container.process.tty,
        "user": {"uid": uid, "gid": gid, "additionalGids": groups},
        "args": arguments,
        "env": environment(&from_image, container, &context.host.hostname),
        "cwd": working_dir.unwrap_or_else(|| "/".into()),
        "capabilities": {"bounding": capabilities, "effective": effective, "permitted": effective},
        "noNewPrivileges": container.process.security.no_new_privileges,
        "oomScoreAdj": container.process.oom_score_adj.max(context.oom_score_min),
    }))
}

/// `command` replaces the image's entry point and its arguments, `args` the arguments only.
fn arguments(container: &ContainerSpec, image: &ImageConfiguration) -> Result<Vec<String>, String> {
    let config = image.config().as_ref();
    let entrypoint = config.and_then(|config| config.entrypoint().clone()).unwrap_or_default();
    let cmd = config.and_then(|config| config.cmd().clone()).unwrap_or_default();
    let (program, arguments) = match (container.command.is_empty(), container.args.is_empty()) {
        (true, true) => (entrypoint, cmd),
        (true, false) => (entrypoint, container.args.clone()),
        (false, _) => (container.command.clone(), container.args.clone()),
    };
    let all = [program, arguments].concat();
    match all.is_empty() {
        true => Err(format!("no command specified: image {:?} has none either", container.image)),
        false => Ok(all),
    }
}

fn environment(from_image: &[String], container: &ContainerSpec, hostname: &str) -> Vec<String> {
    let name = |line: &str| line.split('=').next().unwrap_or_default().to_owned();
    let mut all: Vec<String> = vec![DEFAULT_PATH.into(), format!("HOSTNAME={hostname}")];
    if container.process.tty {
        all.push("TERM=xterm".into());
    }
    let own = container.env.iter().map(|(name, value)| format!("{name}={value}"));
    for line in from_image.iter().cloned().chain(own) {
        all.retain(|known| name(known) != name(&line));
        all.push(line);
    }
    all
}

fn mounts(container: &ContainerSpec, context: &SpecContext<'_>) -> Vec<Value> {
    let privileged = container.process.security.privileged;
    let access = if privileged { "rw" } else { "ro" };
    let mount = |destination: &str, kind: &str, source: &str, options: &[&str]| json!({"destination": destination, "type": kind, "source": source, "options": options});
    let mut mounts = vec![
        mount("/proc", "proc", "proc", &["nosuid", "noexec", "nodev"]),
        mount("/dev", "tmpfs", "tmpfs", &["nosuid", "strictatime", "mode=755", "size=65536k"]),
        mount(
            "/dev/pts",
            "devpts",
            "devpts",
            &["nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"],
        ),
        mount("/dev/mqueue", "mqueue", "mqueue", &["nosuid", "noexec", "nodev"]),
        shared_memory::spec(&context.shared_memory, context.host.host_ipc),
        mount("/sys", "sysfs", "sysfs", &["nosuid", "noexec", "nodev", access]),
        mount("/sys/fs/cgroup", "cgroup", "cgroup", &["nosuid", "noexec", "nodev", "relatime", access]),
    ];
    if context.host.host_network {
        // A sysfs of the host's network namespace cannot be mounted again.
        mounts[5] = mount("/sys", "bind", "/sys", &["rbind", "nosuid", "noexec", "nodev", access]);
        mounts.remove(6);
    }
    let bind_as = |source: &Path, destination: &str, read_only: bool, propagation: &str| {
        let access = if read_only { "ro" } else { "rw" };
        mount(destination, "bind", &source.to_string_lossy(), &["rbind", propagation, access])
    };
    let bind = |source: &Path, destination: &str, read_only: bool| {
        bind_as(source, destination, read_only, propagation(MountPropagation::Private))
    };
    let own: Vec<&Mount> =
        container.files.iter().flat_map(|files| &files.mounts).chain(&container.process.mounts).collect();
    let is_covered = |path: &str| own.iter().any(|volume| volume.guest == path);
    for file in ["hosts", "hostname", "resolv.conf"] {
        let path = format!("/etc/{file}");
        if !is_covered(&path) {
            mounts.push(bind(
                &context.pod_folder.join(file),
                &path,
                container.process.security.read_only_root,
            ));
        }
    }
    let message = &container.process.termination_message_path;
    if !message.is_empty() && !is_covered(message) {
        mounts.push(bind(&context.message_file, message, false));
    }
    mounts.extend(own.iter().map(|volume| {
        bind_as(&volume.host, &volume.guest, volume.read_only, propagation(volume.propagation))
    }));
    mounts
}

/// The mount option for a propagation mode, and the value of `rootfsPropagation`.
fn propagation(propagation: MountPropagation) -> &'static str {
    match propagation {
        MountPropagation::Private => "rprivate",
        MountPropagation::HostToContainer => "rslave",
        MountPropagation::Bidirectional => "rshared",
    }
}

/// The propagation of the root mount, without which that of mounts below it has no effect.
fn root_propagation(container: &ContainerSpec) -> Option<&'static str> {
    let has = |wanted| container.process.mounts.iter().any(|mount| mount.propagation == wanted);
    let wanted = [MountPropagation::Bidirectional, MountPropagation::HostToContainer];
    wanted.into_iter().find(|wanted| has(*wanted)).map(propagation)
}

fn linux(container: &ContainerSpec, context: &SpecContext<'_>) -> Result<Value, String> {
    let security = &container.process.security;
    let mut namespaces = vec![json!({"type": "mount"})];
    let mut join = |kind: &str, file: &str| {
        let path = context.namespaces.join(file);
        namespaces.push(json!({"type": kind, "path": path.to_string_lossy()}));
    };
    if !context.host.host_network {
        join("network", "net");
        join("uts", "uts");
    }
    if !context.host.host_ipc {
        join("ipc", "ipc");
    }
    match context.target_pid {
        Some(pid) => namespaces.push(json!({"type": "pid", "path": format!("/proc/{pid}/ns/pid")})),
        None if context.host.shares_processes => {
            let path = context.namespaces.join(crate::namespaces::PROCESSES);
            namespaces.push(json!({"type": "pid", "path": path.to_string_lossy()}));
        }
        None if !context.host.host_pid => namespaces.push(json!({"type": "pid"})),
        None => {}
    }
    let unmasked = security.privileged || security.unmasked_proc;
    let masked: &[&str] = if unmasked { &[] } else { &MASKED_PATHS };
    let read_only: &[&str] = if unmasked { &[] } else { &READ_ONLY_PATHS };
    let mut linux = json!({
        "namespaces": namespaces,
        "cgroupsPath": context.cgroup,
        "maskedPaths": masked,
        "readonlyPaths": read_only,
        "sysctl": context.host.sysctls,
        "resources": resources(container, context.limits_swap),
        "devices": devices::nodes(&container.process.devices),
    });
    if let Some(propagation) = root_propagation(container) {
        linux["rootfsPropagation"] = propagation.into();
    }
    if let Some(filter) = filter(container, context)? {
        linux["seccomp"] = filter;
    }
    Ok(linux)
}

/// The seccomp filter. A privileged container has none.
fn filter(container: &ContainerSpec, context: &SpecContext<'_>) -> Result<Option<Value>, String> {
    let security = &container.process.security;
    match &security.seccomp {
        _ if security.privileged => Ok(None),
        SeccompProfile::Unconfined => Ok(None),
        SeccompProfile::RuntimeDefault => {
            Ok(Some(seccomp::default_profile(&capabilities(security, context.bounding_set))))
        }
        SeccompProfile::Localhost(name) => {
            let text = context.seccomp_profile.as_deref();
            let text = text.ok_or_else(|| format!("the node has no seccomp profile {name:?}"))?;
            let profile = serde_json::from_str(text);
            profile.map(Some).map_err(|error| format!("the seccomp profile {name:?} is damaged: {error}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{fixtures::container, *};

    fn image() -> ImageConfiguration {
        let config = json!({"architecture": "amd64", "os": "linux",
            "config": {"Entrypoint": ["/entry"], "Cmd": ["default"], "Env": ["PATH=/bin", "A=image"],
                "WorkingDir": "/work"},
            "rootfs": {"type": "layers", "diff_ids": []}});
        serde_json::from_value(config).unwrap()
    }

    fn context(host: &SandboxHost) -> SpecContext<'_> {
        SpecContext {
            host,
            namespaces: "/ns".into(),
            pod_folder: "/pod".into(),
            shared_memory: "/pod/shm".into(),
            message_file: "/pod/message".into(),
            cgroup: "/mayfly/uid/c".into(),
            user: ProcessUser::default(),
            seccomp_profile: None,
            target_pid: None,
            bounding_set: u64::MAX,
            oom_score_min: -1000,
            limits_swap: true,
        }
    }

    fn built(container: &ContainerSpec, host: &SandboxHost) -> Value {
        serde_json::to_value(build(container, &image(), &context(host)).unwrap()).unwrap()
    }

    #[test]
    fn command_and_args_override_the_image() {
        let host = SandboxHost::default();
        for (command, args, expected) in [
            (vec![], vec![], vec!["/entry", "default"]),
            (vec![], vec!["x"], vec!["/entry", "x"]),
            (vec!["sh"], vec![], vec!["sh"]),
            (vec!["sh"], vec!["-c"], vec!["sh", "-c"]),
        ] {
            let owned = |list: Vec<&str>| list.into_iter().map(String::from).collect();
            let spec = ContainerSpec { command: owned(command), args: owned(args), ..container() };
            assert_eq!(built(&spec, &host)["process"]["args"], json!(expected));
        }
    }

    #[test]
    fn container_environment_overrides_the_image() {
        let mut spec = container();
        spec.env = vec![("A".into(), "own".into())];
        let built = built(&spec, &SandboxHost { hostname: "p".into(), ..Default::default() });
        assert_eq!(built["process"]["env"], json!(["HOSTNAME=p", "PATH=/bin", "A=own"]));
        assert_eq!(built["process"]["cwd"], "/work");
    }

    #[test]
    fn a_pod_joins_its_namespaces_or_the_hosts() {
        let kinds = |host: &SandboxHost| {
            let built = built(&container(), host);
            let list = built["linux"]["namespaces"].as_array().unwrap().clone();
            list.iter().map(|one| one["type"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
        };
        assert_eq!(kinds(&SandboxHost::default()), ["mount", "network", "uts", "ipc", "pid"]);
        let host =
            SandboxHost { host_network: true, host_pid: true, host_ipc: true, ..SandboxHost::default() };
        assert_eq!(kinds(&host), ["mount"]);
    }

    #[test]
    fn limits_become_cgroup_values() {
        let mut spec = container();
        (spec.memory_bytes_max, spec.cpu_millis_max) = (Some(1 << 20), Some(250));
        spec.process.cpu_millis_request = 500;
        let built = built(&spec, &SandboxHost::default());
        let resources = &built["linux"]["resources"];
        assert_eq!(resources["memory"], json!({"limit": 1 << 20, "swap": 1 << 20}));
        assert_eq!(resources["cpu"]["quota"], 25_000);
        assert_eq!(resources["cpu"]["shares"], 512);
        // runc fails to start a container with a limit that the kernel does not have.
        let host = SandboxHost::default();
        let context = SpecContext { limits_swap: false, ..context(&host) };
        let built = serde_json::to_value(build(&spec, &image(), &context).unwrap()).unwrap();
        assert_eq!(built["linux"]["resources"]["memory"], json!({"limit": 1 << 20}));
    }

    #[test]
    fn a_volume_is_mounted_after_the_pods_own_files_and_may_replace_them() {
        let mut spec = container();
        spec.process.mounts = vec![Mount {
            host: "/v".into(),
            guest: "/etc/hosts".into(),
            read_only: true,
            ..Mount::default()
        }];
        let built = built(&spec, &SandboxHost::default());
        let mounts = built["mounts"].as_array().unwrap();
        let at: Vec<_> = mounts.iter().filter(|mount| mount["destination"] == "/etc/hosts").collect();
        assert_eq!(at.len(), 1);
        assert_eq!(at[0]["source"], "/v");
    }

    #[test]
    fn mounts_propagate_as_the_volume_mount_says() {
        for (wanted, option, root) in [
            (MountPropagation::Private, "rprivate", None),
            (MountPropagation::HostToContainer, "rslave", Some("rslave")),
            (MountPropagation::Bidirectional, "rshared", Some("rshared")),
        ] {
            let mut spec = container();
            let volume = |guest: &str, propagation| Mount {
                host: "/v".into(),
                guest: guest.into(),
                read_only: false,
                propagation,
            };
            spec.process.mounts = vec![volume("/a", MountPropagation::Private), volume("/b", wanted)];
            let built = built(&spec, &SandboxHost::default());
            let mounts = built["mounts"].as_array().unwrap();
            let mount = mounts.iter().find(|mount| mount["destination"] == "/b").unwrap();
            assert_eq!(mount["options"], json!(["rbind", option, "rw"]));
            assert_eq!(built["linux"]["rootfsPropagation"].as_str(), root);
        }
    }

    #[test]
    fn hooks_are_listed_by_their_moment() {
        let mut spec = container();
        let hook = |moment, path: &str| ContainerHook {
            moment,
            path: path.into(),
            args: vec!["x".into(), "update".into()],
            env: vec!["A=1".into()],
            timeout_s: None,
        };
        spec.process.hooks = vec![
            hook(HookMoment::CreateContainer, "/bin/x"),
            hook(HookMoment::Poststop, "/bin/y"),
            hook(HookMoment::CreateContainer, "/bin/z"),
        ];
        let built = built(&spec, &SandboxHost::default());
        let paths = |moment: &str| -> Vec<String> {
            let hooks = built["hooks"][moment].as_array().cloned().unwrap_or_default();
            hooks.iter().filter_map(|hook| Some(hook["path"].as_str()?.to_owned())).collect()
        };
        assert_eq!(
            (paths("createContainer"), paths("poststop")),
            (vec!["/bin/x".into(), "/bin/z".into()], vec!["/bin/y".into()])
        );
        assert_eq!(built["hooks"]["poststop"][0]["args"], json!(["x", "update"]));
        assert_eq!(paths("prestart"), [""; 0]);
    }

    #[test]
    fn root_is_rejected_with_run_as_non_root() {
        let mut spec = container();
        let refusal = |spec: &ContainerSpec, uid: u32| {
            let user = ProcessUser { uid, ..ProcessUser::default() };
            non_root_refusal(spec, &user, "p_ns(u)")
        };
        assert_eq!(refusal(&spec, 0), None);
        spec.process.security.run_as_non_root = true;
        assert_eq!(refusal(&spec, 1), None);
        let place = "(pod: \"p_ns(u)\", container: c)";
        let expected = format!("container has runAsNonRoot and image will run as root {place}");
        assert_eq!(refusal(&spec, 0), Some(expected));
        spec.process.security.user = Some(0);
        let expected = format!("container's runAsUser breaks non-root policy {place}");
        assert_eq!(refusal(&spec, 0), Some(expected));
    }

    #[test]
    fn a_debugger_joins_the_processes_of_its_target() {
        let host = SandboxHost::default();
        let context = SpecContext { target_pid: Some(7), ..context(&host) };
        let spec = serde_json::to_value(build(&container(), &image(), &context).unwrap()).unwrap();
        let namespaces = spec["linux"]["namespaces"].as_array().unwrap();
        let pid = namespaces.iter().find(|namespace| namespace["type"] == "pid").unwrap();
        assert_eq!(pid["path"], "/proc/7/ns/pid");
        let shared = SandboxHost { shares_processes: true, ..SandboxHost::default() };
        let spec = built(&container(), &shared);
        let namespaces = spec["linux"]["namespaces"].as_array().unwrap();
        let pid = namespaces.iter().find(|namespace| namespace["type"] == "pid").unwrap();
        assert!(pid["path"].as_str().unwrap().ends_with("/pid"), "{pid}");
    }

    #[test]
    fn the_system_call_filter_is_the_one_that_the_container_names() {
        let host = SandboxHost::default();
        let filter = |profile: SeccompProfile, privileged: bool, text: Option<&str>| {
            let mut container = container();
            container.process.security.seccomp = profile;
            container.process.security.privileged = privileged;
            let context = SpecContext { seccomp_profile: text.map(str::to_owned), ..context(&host) };
            let spec = build(&container, &image(), &context)?;
            Ok::<_, String>(serde_json::to_value(spec).unwrap()["linux"]["seccomp"].clone())
        };
        assert!(filter(SeccompProfile::Unconfined, false, None).unwrap().is_null());
        assert!(filter(SeccompProfile::RuntimeDefault, true, None).unwrap().is_null());
        let default = filter(SeccompProfile::RuntimeDefault, false, None).unwrap();
        assert_eq!(default["defaultAction"], "SCMP_ACT_ALLOW");
        let own = SeccompProfile::Localhost("p".into());
        let text = r#"{"defaultAction": "SCMP_ACT_LOG"}"#;
        assert_eq!(filter(own.clone(), false, Some(text)).unwrap()["defaultAction"], "SCMP_ACT_LOG");
        assert!(filter(own.clone(), false, Some("{")).unwrap_err().contains("damaged"));
        assert!(filter(own, false, None).unwrap_err().contains("no seccomp profile"));
    }
}
