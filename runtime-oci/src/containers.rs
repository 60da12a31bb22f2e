//! Containers: start, wait, stop, cleanup.
//!
//! ```text
//!   start: image ─▶ snapshot ─▶ container record ─▶ task (with its log process) ─▶ Running
//!   end:   wait ─▶ the kernel's OOM record ─▶ exit.json ─▶ task deleted (its log is complete)
//!               ─▶ the message in exit.json ─▶ Exited
//! ```

mod exit;
mod files;
mod host_devices;
mod image_files;
mod signals;

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use containerd_client::{
    services::v1::{
        CloseIoRequest, Container, CreateContainerRequest, CreateTaskRequest, GetRequest, StartRequest,
        container, snapshots::PrepareSnapshotRequest,
    },
    tonic::{Code, Status},
    types::Mount,
};
use mayfly_runtime::{
    ContainerId, ContainerSpec, ContainerState, PodUid, RuntimeError, SandboxHost, SeccompProfile,
};
use prost_types::Any;
use tokio::{io::AsyncWriteExt as _, time::Instant};

pub(crate) use self::files::{ContainerRecord, ExitRecord, load};
use self::{
    files::{layers, write_container_files},
    signals::stop_signal,
};
use crate::{
    cgroup,
    client::{Containerd, SNAPSHOTTER, failed, request},
    host::OciHost,
    images::{RunnableImage, full_name},
    layout::task_id,
    log_shim::start_with_pipes,
    sandbox::Sandbox,
    shared_memory,
    spec::{self, SpecContext},
};

const RUNTIME: &str = "io.containerd.runc.v2";
const SPEC_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";
pub(crate) const LABEL_POD: &str = "mayfly.dev/pod-uid";
pub(crate) const LABEL_NAME: &str = "mayfly.dev/container";
pub(crate) const LABEL_ATTEMPT: &str = "mayfly.dev/attempt";
const SIGKILL: u32 = 9;
/// The end of an error's text in containerd's client if the error has no class.
const CLASS_UNKNOWN: &str = ": unknown";
/// The longest wait of a sandbox's removal for starts of its containers, before the removal is retried.
const STARTS_TIMEOUT: Duration = Duration::from_secs(30);

/// A container that this process knows.
#[derive(Clone, Debug)]
pub(crate) struct Tracked {
    pub(crate) state: ContainerState,
    pub(crate) record: ContainerRecord,
}

impl OciHost {
    /// Starts a container; does nothing if it was started before. The start goes on if the caller drops the future
    /// because the pod is deleted: interrupted halfway, it would leave a container that runs and is in no table.
    pub(crate) async fn start(self: &Arc<Self>, spec: ContainerSpec) -> Result<(), RuntimeError> {
        let (inner, id) = (self.clone(), spec.id.clone());
        // Registered before the task runs, so that the removal of the sandbox waits for it.
        let turn = self.starts.lock().entry(id.clone()).or_default().clone();
        let started = tokio::spawn(async move {
            let result = {
                let _turn = turn.lock().await;
                inner.start_once(spec).await
            };
            // Dropped before the count, so that the last of several calls finds the map's reference alone.
            drop(turn);
            {
                let mut starts = inner.starts.lock();
                if starts.get(&id).is_some_and(|kept| Arc::strong_count(kept) == 1) {
                    starts.remove(&id);
                }
            }
            inner.changed();
            result
        });
        started.await.map_err(|error| RuntimeError::Internal(error.to_string()))?
    }

    /// Waits until no container of the pod is being started.
    pub(crate) async fn starts_ended(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        let mut changes = self.changes();
        let is_starting = || {
            let starts = self.starts.lock();
            starts.iter().any(|(id, turn)| id.pod == *uid && Arc::strong_count(turn) > 1)
        };
        let ended = async {
            while is_starting() {
                // Cannot fail: the sender lives in `self`.
                let _ = changes.changed().await;
            }
        };
        let late = |_| RuntimeError::Internal(format!("containers of pod {uid} are still being started"));
        tokio::time::timeout(STARTS_TIMEOUT, ended).await.map_err(late)
    }

    async fn start_once(self: &Arc<Self>, mut spec: ContainerSpec) -> Result<(), RuntimeError> {
        if self.containers.lock().contains_key(&spec.id) {
            return Ok(());
        }
        if spec.process.security.privileged {
            let found = self.blocking(|| Ok(host_devices::below(Path::new("/dev")))).await?;
            host_devices::add(&mut spec, found);
        }
        let sandbox = self.sandbox(&spec.id.pod)?;
        let client = self.client().await?;
        let image = self.image(&client, &spec).await?;
        // Removes the remains of an interrupted start.
        self.remove_container(&client, &spec.id).await?;
        let mounts = self.prepare(&client, &spec.id, &image).await?;
        let started = self.launch(&client, &spec, &sandbox, &image, mounts).await;
        let record = match started {
            Ok(record) => record,
            Err(error) => {
                self.remove_container(&client, &spec.id).await?;
                return Err(error);
            }
        };
        let state = ContainerState::Running { started: record.started };
        let input = spec.files.as_ref().map(|files| files.stdin.clone());
        self.containers.lock().insert(spec.id.clone(), Tracked { state, record });
        self.watch_exit(spec.id.clone());
        if let Some(file) = input {
            self.feed_input(client, spec.id, file);
        }
        self.changed();
        Ok(())
    }

    async fn image(
        &self,
        client: &Containerd,
        spec: &ContainerSpec,
    ) -> Result<Arc<RunnableImage>, RuntimeError> {
        let name = full_name(&spec.image)?;
        // The kubelet pulls the image before it starts a container.
        self.images
            .find(client, &name)
            .await?
            .ok_or_else(|| RuntimeError::ImageMissing(format!("image {name} is not on this node")))
    }

    /// Creates the container's writable layer over the image.
    async fn prepare(
        &self,
        client: &Containerd,
        id: &ContainerId,
        image: &RunnableImage,
    ) -> Result<Vec<Mount>, RuntimeError> {
        let message = PrepareSnapshotRequest {
            snapshotter: SNAPSHOTTER.into(),
            key: task_id(id),
            parent: image.chain.clone(),
            // Protects the snapshot until the container's record refers to it.
            labels: [("containerd.io/gc.root".to_owned(), jiff::Timestamp::now().to_string())].into(),
        };
        match client.snapshots().prepare(request(message)).await {
            Ok(answer) => Ok(answer.into_inner().mounts),
            Err(status) => {
                // The next attempt unpacks the image again.
                self.images.forget();
                Err(failed("prepare a container's file system")(status))
            }
        }
    }

    async fn launch(
        &self,
        client: &Containerd,
        spec: &ContainerSpec,
        sandbox: &Sandbox,
        image: &RunnableImage,
        mounts: Vec<Mount>,
    ) -> Result<ContainerRecord, RuntimeError> {
        let folder = self.layout.container(&spec.id);
        let image_config = image.config.config().as_ref();
        let image_user = image_config.and_then(|config| config.user().clone()).unwrap_or_default();
        let (passwd, group) = self.accounts(&mounts, &image_user, spec).await?;
        let user = spec::user(&spec.process.security, &image_user, &passwd, &group)
            .map_err(RuntimeError::Invalid)?;
        if let Some(why) = spec::non_root_refusal(spec, &user, &sandbox.title()) {
            return Err(RuntimeError::ConfigRefused(why));
        }
        let context = SpecContext {
            host: &sandbox.host,
            namespaces: self.layout.namespaces(&spec.id.pod),
            pod_folder: self.layout.pod(&spec.id.pod),
            shared_memory: self.shared_memory(&spec.id.pod, &sandbox.host).await?,
            message_file: folder.join("message"),
            cgroup: sandbox.group().container(&spec.id),
            user,
            seccomp_profile: self.seccomp_profile(spec).await?,
            target_pid: self.target_pid(client, spec).await?,
            bounding_set: spec::bounding_set(),
            oom_score_min: spec::oom_score_min(spec::bounding_set()),
            limits_swap: cgroup::limits_swap(),
        };
        let oci = spec::build(spec, &image.config, &context).map_err(RuntimeError::Invalid)?;
        let record = ContainerRecord {
            started: jiff::Timestamp::now(),
            tty: spec.process.tty,
            stdin: spec.process.stdin,
            stdin_once: spec.process.stdin_once,
            has_input_file: spec.files.is_some(),
            stop_signal: stop_signal(
                spec.process.stop_signal.as_deref(),
                image_config.and_then(|config| config.stop_signal().as_deref()),
            ),
            log: spec.log_path.clone(),
            message_from_log: spec.process.termination_message_from_log,
        };
        self.blocking({
            let (record, spec, socket) = (record.clone(), spec.clone(), self.layout.attach_socket(&spec.id));
            move || write_container_files(&folder, &record, &spec, socket)
        })
        .await?;
        self.create_record(client, spec, image, &oci).await?;
        self.create_task(client, &spec.id, &record, mounts).await?;
        let start = StartRequest { container_id: task_id(&spec.id), exec_id: String::new() };
        client.tasks().start(request(start)).await.map_err(start_failed)?;
        Ok(record)
    }

    /// The pod's `/dev/shm`, mounted here at the pod's first start of a container, so that pods of an earlier version
    /// have one, too.
    async fn shared_memory(&self, uid: &PodUid, host: &SandboxHost) -> Result<PathBuf, RuntimeError> {
        let folder = self.layout.shared_memory(uid);
        if !host.host_ipc {
            let made = folder.clone();
            self.blocking(move || shared_memory::create(&made)).await?;
        }
        Ok(folder)
    }

    /// The node's seccomp profile that a container names. The name must not lead out of the profile directory.
    async fn seccomp_profile(&self, spec: &ContainerSpec) -> Result<Option<String>, RuntimeError> {
        let SeccompProfile::Localhost(name) = &spec.process.security.seccomp else { return Ok(None) };
        let inside = |part| matches!(part, std::path::Component::Normal(_));
        if name.is_empty() || !Path::new(name).components().all(inside) {
            return Err(RuntimeError::Invalid(format!("{name:?} is not a valid name of a seccomp profile")));
        }
        let path = self.layout.seccomp().join(name);
        let text = tokio::fs::read_to_string(&path).await;
        text.map(Some).map_err(|error| {
            RuntimeError::Invalid(format!("cannot read the seccomp profile {}: {error}", path.display()))
        })
    }

    /// The process of the container that an ephemeral debug container targets.
    async fn target_pid(
        &self,
        client: &Containerd,
        spec: &ContainerSpec,
    ) -> Result<Option<u32>, RuntimeError> {
        let Some(name) = &spec.process.target_container else { return Ok(None) };
        let of_pod = self.of_pod(&spec.id.pod);
        let target = of_pod
            .iter()
            .find(|(id, state)| id.name == *name && matches!(state, ContainerState::Running { .. }));
        let (target, _) = target.ok_or_else(|| {
            RuntimeError::Invalid(format!("unable to find target container {name:?}: it does not run"))
        })?;
        let message = GetRequest { container_id: task_id(target), exec_id: String::new() };
        let answer = client.tasks().get(request(message)).await.map_err(failed("look up a container"))?;
        Ok(answer.into_inner().process.map(|process| process.pid))
    }

    /// The image's `passwd` and `group` files, if a name must be resolved in them.
    async fn accounts(
        &self,
        mounts: &[Mount],
        image_user: &str,
        spec: &ContainerSpec,
    ) -> Result<(String, String), RuntimeError> {
        let is_plain_root = image_user.is_empty() && spec.process.security.user.is_none();
        let layers = layers(mounts);
        if is_plain_root || layers.is_empty() {
            return Ok(Default::default());
        }
        self.blocking(move || {
            Ok((image_files::read(&layers, "etc/passwd"), image_files::read(&layers, "etc/group")))
        })
        .await
    }

    async fn create_record(
        &self,
        client: &Containerd,
        spec: &ContainerSpec,
        image: &RunnableImage,
        oci: &oci_spec::runtime::Spec,
    ) -> Result<(), RuntimeError> {
        let id = &spec.id;
        let labels: HashMap<String, String> = [
            (LABEL_POD.to_owned(), id.pod.0.clone()),
            (LABEL_NAME.to_owned(), id.name.clone()),
            (LABEL_ATTEMPT.to_owned(), id.attempt.to_string()),
        ]
        .into();
        let value = serde_json::to_vec(oci).map_err(|error| RuntimeError::Internal(error.to_string()))?;
        let container = Container {
            id: task_id(id),
            labels,
            image: image.name.clone(),
            runtime: Some(container::Runtime { name: RUNTIME.into(), options: None }),
            spec: Some(Any { type_url: SPEC_TYPE.into(), value }),
            snapshotter: SNAPSHOTTER.into(),
            snapshot_key: task_id(id),
            ..Container::default()
        };
        let message = CreateContainerRequest { container: Some(container) };
        client.containers().create(request(message)).await.map_err(failed("make a container"))?;
        Ok(())
    }

    async fn create_task(
        &self,
        client: &Containerd,
        id: &ContainerId,
        record: &ContainerRecord,
        rootfs: Vec<Mount>,
    ) -> Result<(), RuntimeError> {
        let folder = self.layout.container(id);
        let stdin = match record.has_input() {
            true => folder.join("stdin").to_string_lossy().into_owned(),
            false => String::new(),
        };
        let log_config = folder.join("log.json");
        let mut log_shim = None;
        let [stdout, stderr] = match record.output_pipes(&folder) {
            Some(pipes) => {
                let started = start_with_pipes(&self.config.program, &log_config).await;
                let internal = |error| RuntimeError::Internal(format!("cannot start the log shim: {error}"));
                log_shim = Some(started.map_err(internal)?);
                pipes.map(|pipe| pipe.to_string_lossy().into_owned())
            }
            // A terminal has a single output.
            None if record.tty => [log_uri(&self.config.program, &log_config), String::new()],
            None => [(); 2].map(|()| log_uri(&self.config.program, &log_config)),
        };
        let (container_id, terminal) = (task_id(id), record.tty);
        let message = CreateTaskRequest {
            container_id,
            rootfs,
            stdin,
            stdout,
            stderr,
            terminal,
            ..CreateTaskRequest::default()
        };
        let created = client.tasks().create(request(message)).await.map_err(start_failed);
        if let Some(mut log_shim) = log_shim {
            if created.is_err() {
                // The container was not started, so its pipes stay empty.
                let _ = log_shim.start_kill();
            }
            // Ends with the container; reaped here, so that it does not stay a zombie.
            tokio::spawn(async move { drop(log_shim.wait().await) });
        }
        created.map(|_| ())
    }

    /// Copies a job's input file into the container's stdin in the background, and closes it at the end.
    fn feed_input(self: &Arc<Self>, client: Containerd, id: ContainerId, file: std::path::PathBuf) {
        let inner = self.clone();
        tokio::spawn(async move {
            let fifo = inner.layout.container(&id).join("stdin");
            let fed = async {
                let mut options = tokio::net::unix::pipe::OpenOptions::new();
                let mut fifo = options.read_write(true).open_sender(&fifo)?;
                let content = tokio::fs::read(&file).await?;
                fifo.write_all(&content).await
            };
            let mut changes = inner.changes();
            tokio::select! {
                fed = fed => if let Err(error) = fed {
                    tracing::warn!(container = %id, %error, "cannot write a container's input");
                },
                // A container that ends without reading its input ignores the rest.
                _ = inner.ended(&id, &mut changes, Instant::now() + Duration::from_secs(u32::MAX.into())) => {}
            }
            inner.close_input(&client, &id, "").await;
        });
    }

    /// Closes the standard input of a process.
    pub(crate) async fn close_input(&self, client: &Containerd, id: &ContainerId, exec_id: &str) {
        let message = CloseIoRequest { container_id: task_id(id), exec_id: exec_id.into(), stdin: true };
        if let Err(error) = client.tasks().close_io(request(message)).await {
            tracing::debug!(container = %id, %error, "cannot end an input");
        }
    }
}

/// Maps an error of the start of a container's process; runc's text is passed on unchanged. An error of containerd
/// itself does not end the attempt.
fn start_failed(status: Status) -> RuntimeError {
    let message = status.message();
    match status.code() {
        Code::Unavailable | Code::Cancelled | Code::DeadlineExceeded => {
            RuntimeError::Internal(message.to_owned())
        }
        // containerd's client appends the class of the error.
        Code::Unknown if !message.ends_with(CLASS_UNKNOWN) => {
            RuntimeError::StartFailed(format!("failed to create containerd task: {message}{CLASS_UNKNOWN}"))
        }
        _ => RuntimeError::StartFailed(format!("failed to create containerd task: {message}")),
    }
}

/// containerd starts this program with the path of the configuration as its argument.
fn log_uri(program: &Path, config: &Path) -> String {
    let escaped: String = config
        .to_string_lossy()
        .bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'/' | b'-' | b'_' | b'.' => {
                char::from(byte).to_string()
            }
            other => format!("%{other:02X}"),
        })
        .collect();
    format!("binary://{}?log-shim={escaped}", program.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lost_connection_does_not_end_an_attempt() {
        for (code, message, expected) in [
            (Code::Unknown, "exec: no file", Some("exec: no file: unknown")),
            (Code::Unknown, "exec: no file: unknown", Some("exec: no file: unknown")),
            (Code::FailedPrecondition, "no cgroup", Some("no cgroup")),
            (Code::Unavailable, "closed", None),
            (Code::Cancelled, "closed", None),
        ] {
            let error = start_failed(Status::new(code, message));
            let expected = match expected {
                Some(text) => RuntimeError::StartFailed(format!("failed to create containerd task: {text}")),
                None => RuntimeError::Internal(message.into()),
            };
            assert_eq!(error, expected, "{code} {message}");
        }
    }

    #[test]
    fn the_log_programs_argument_is_escaped() {
        let uri = log_uri(Path::new("/usr/bin/mayfly"), Path::new("/data dir/a&b/log.json"));
        assert_eq!(uri, "binary:///usr/bin/mayfly?log-shim=/data%20dir/a%26b/log.json");
    }
}
