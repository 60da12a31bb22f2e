//! Containers: started, waited for, stopped, cleaned up.
//!
//! ```text
//!   start: image ─▶ snapshot ─▶ container record ─▶ task (with its log process) ─▶ Running
//!   end:   wait ─▶ what the kernel says (OOM) ─▶ task deleted (its log is complete) ─▶ exit.json ─▶ Exited
//! ```

use std::{
    collections::HashMap, fs, io, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc, time::Duration,
};

use containerd_client::{
    services::v1::{
        CloseIoRequest, Container, CreateContainerRequest, CreateTaskRequest, DeleteContainerRequest,
        DeleteTaskRequest, KillRequest, StartRequest, WaitRequest, container,
        snapshots::{PrepareSnapshotRequest, RemoveSnapshotRequest},
    },
    tonic::Code,
    types::Mount,
};
use mayfly_runtime::{ContainerId, ContainerSpec, ContainerState, PodUid, PullPolicy, RuntimeError};
use prost_types::Any;
use serde::{Deserialize, Serialize};
use tokio::{
    io::AsyncWriteExt as _,
    time::{Instant, sleep, timeout_at},
};

use crate::{
    cgroup,
    client::{Containerd, SNAPSHOTTER, failed, is_disconnected, or_absent, request},
    host::OciHost,
    images::{RunnableImage, full_name},
    layout::{Layout, task_id},
    log_shim::LogShimConfig,
    spec::{self, ContainerPlace},
};

const RUNTIME: &str = "io.containerd.runc.v2";
const SPEC_TYPE: &str = "types.containerd.io/opencontainers/runtime-spec/1/Spec";
pub(crate) const LABEL_POD: &str = "mayfly.dev/pod-uid";
pub(crate) const LABEL_NAME: &str = "mayfly.dev/container";
pub(crate) const LABEL_ATTEMPT: &str = "mayfly.dev/attempt";
const SIGKILL: u32 = 9;
/// Exit code of a process that was killed, as a shell counts.
const EXIT_KILLED: i32 = 137;
/// How long a killed container may take to end.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);
/// Pause before containerd is asked again that did not answer.
const RETRY_AFTER: Duration = Duration::from_millis(300);
/// Longest termination message, in bytes, and the part of it that is taken from the log (upstream's limits).
const MESSAGE_BYTES_MAX: usize = 4096;
const MESSAGE_LOG_BYTES_MAX: usize = 2048;
/// Lines of the log that become a termination message.
const MESSAGE_LOG_LINES_MAX: usize = 80;

/// A container that this process knows.
#[derive(Clone, Debug)]
pub(crate) struct Tracked {
    pub(crate) state: ContainerState,
    pub(crate) record: ContainerRecord,
}

/// What must be known of a container after a restart of this process.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ContainerRecord {
    pub(crate) started: jiff::Timestamp,
    pub(crate) tty: bool,
    pub(crate) stdin: bool,
    pub(crate) stdin_once: bool,
    pub(crate) has_input_file: bool,
    pub(crate) stop_signal: u32,
    pub(crate) log: std::path::PathBuf,
    pub(crate) message_from_log: bool,
}

/// How a container ended; kept on disk until its sandbox goes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct ExitRecord {
    pub(crate) started: jiff::Timestamp,
    pub(crate) finished: jiff::Timestamp,
    pub(crate) exit_code: i32,
    pub(crate) reason: String,
    pub(crate) message: String,
}

impl From<ExitRecord> for ContainerState {
    fn from(exit: ExitRecord) -> Self {
        let ExitRecord { started, finished, exit_code, reason, message } = exit;
        Self::Exited { started, finished, exit_code, reason, message }
    }
}

impl OciHost {
    /// Starts a container; one that was started before is left as it is.
    pub(crate) async fn start(self: &Arc<Self>, spec: ContainerSpec) -> Result<(), RuntimeError> {
        if self.containers.lock().contains_key(&spec.id) {
            return Ok(());
        }
        let sandbox = self.sandbox(&spec.id.pod)?;
        let client = self.client().await?;
        let image = self.image(&client, &spec).await?;
        // Left by a start that was interrupted.
        self.remove_container(&client, &spec.id).await?;
        let mounts = self.prepare(&client, &spec.id, &image).await?;
        let started = self.launch(&client, &spec, &sandbox.host, &image, mounts).await;
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
        if let (Some(image), false) =
            (self.images.find(client, &name).await?, spec.process.pull == PullPolicy::Always)
        {
            return Ok(image);
        }
        if spec.process.pull == PullPolicy::Never {
            return Err(RuntimeError::ImageMissing(format!(
                "image {name} is not present with pull policy of Never: import it with mayfly image import"
            )));
        }
        Err(RuntimeError::ImageMissing(format!(
            "image {name} cannot be pulled: this build pulls from no registry; import it with mayfly image import, \
             under a tag other than latest or with imagePullPolicy: IfNotPresent"
        )))
    }

    /// The container's own layer over the image.
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
            // Kept until the container's record refers to it.
            labels: [("containerd.io/gc.root".to_owned(), jiff::Timestamp::now().to_string())].into(),
        };
        match client.snapshots().prepare(request(message)).await {
            Ok(answer) => Ok(answer.into_inner().mounts),
            Err(status) => {
                // The next try unpacks the image again.
                self.images.forget();
                Err(failed("prepare a container's file system")(status))
            }
        }
    }

    async fn launch(
        &self,
        client: &Containerd,
        spec: &ContainerSpec,
        host: &mayfly_runtime::SandboxHost,
        image: &RunnableImage,
        mounts: Vec<Mount>,
    ) -> Result<ContainerRecord, RuntimeError> {
        let folder = self.layout.container(&spec.id);
        let image_config = image.config.config().as_ref();
        let image_user = image_config.and_then(|config| config.user().clone()).unwrap_or_default();
        let (passwd, group) = self.accounts(&mounts, &image_user, spec).await?;
        let user = spec::user(&spec.process.security, &image_user, &passwd, &group)
            .map_err(RuntimeError::Invalid)?;
        let around = ContainerPlace {
            host,
            namespaces: self.layout.namespaces(&spec.id.pod),
            pod_folder: self.layout.pod(&spec.id.pod),
            message_file: folder.join("message"),
            cgroup: cgroup::path(&spec.id),
            user,
        };
        let oci = spec::build(spec, &image.config, &around).map_err(RuntimeError::Invalid)?;
        let record = ContainerRecord {
            started: jiff::Timestamp::now(),
            tty: spec.process.tty,
            stdin: spec.process.stdin,
            stdin_once: spec.process.stdin_once,
            has_input_file: spec.files.is_some(),
            stop_signal: stop_signal(spec, image_config.and_then(|config| config.stop_signal().clone())),
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

    /// The image's `passwd` and `group`, where a name must be looked up in them.
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
        self.blocking(move || Ok((read_in(&layers, "etc/passwd"), read_in(&layers, "etc/group")))).await
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
        let log = log_uri(&self.config.log_shim, &folder.join("log.json"));
        let stdin = match record.stdin || record.has_input_file {
            true => folder.join("stdin").to_string_lossy().into_owned(),
            false => String::new(),
        };
        let message = CreateTaskRequest {
            container_id: task_id(id),
            rootfs,
            stdin,
            stdout: log.clone(),
            // A terminal has one output.
            stderr: if record.tty { String::new() } else { log },
            terminal: record.tty,
            ..CreateTaskRequest::default()
        };
        client.tasks().create(request(message)).await.map_err(start_failed)?;
        Ok(())
    }

    /// Waits in the background for the container's end.
    pub(crate) fn watch_exit(self: &Arc<Self>, id: ContainerId) {
        let inner = self.clone();
        tokio::spawn(async move {
            let (exit_code, finished) = inner.wait(&id).await;
            let exit = loop {
                match inner.finish(&id, exit_code, finished).await {
                    Ok(exit) => break exit,
                    Err(error) => {
                        tracing::warn!(container = %id, %error, "cannot clean up after a container; will try again");
                        sleep(RETRY_AFTER).await;
                    }
                }
            };
            if let Some(container) = inner.containers.lock().get_mut(&id) {
                container.state = exit.into();
            }
            inner.changed();
        });
    }

    /// The exit code and time of a container's process.
    async fn wait(&self, id: &ContainerId) -> (i32, jiff::Timestamp) {
        let mut client = self.client().await;
        loop {
            if let Ok(known) = &client {
                let message = WaitRequest { container_id: task_id(id), exec_id: String::new() };
                match known.tasks().wait(request(message)).await {
                    Ok(answer) => {
                        let answer = answer.into_inner();
                        let at =
                            answer.exited_at.and_then(|at| jiff::Timestamp::new(at.seconds, at.nanos).ok());
                        let code = i32::try_from(answer.exit_status).unwrap_or(EXIT_KILLED);
                        return (code, at.unwrap_or_else(jiff::Timestamp::now));
                    }
                    Err(status) if status.code() == Code::NotFound => {
                        return (EXIT_KILLED, jiff::Timestamp::now());
                    }
                    Err(error) => tracing::debug!(container = %id, %error, "waiting for a container again"),
                }
            }
            sleep(RETRY_AFTER).await;
            client = self.reconnect().await;
        }
    }

    /// Cleans up after an ended container, and writes down how it ended.
    async fn finish(
        &self,
        id: &ContainerId,
        exit_code: i32,
        finished: jiff::Timestamp,
    ) -> Result<ExitRecord, RuntimeError> {
        let record = self.containers.lock().get(id).map(|container| container.record.clone());
        let file = self.layout.container(id).join("exit.json");
        if let Ok(text) = fs::read(&file)
            && let Ok(exit) = serde_json::from_slice(&text)
        {
            return Ok(exit);
        }
        let was_oom = cgroup::was_out_of_memory(id);
        let client = self.client().await?;
        if let Err(error) = self.remove_container(&client, id).await {
            self.reconnect().await?;
            return Err(error);
        }
        let reason = match (exit_code, was_oom) {
            (0, _) => "Completed",
            (_, true) => "OOMKilled",
            (_, false) => "Error",
        };
        let folder = self.layout.container(id);
        let (log, from_log) = match &record {
            Some(record) => (record.log.clone(), record.message_from_log && exit_code != 0),
            None => (Default::default(), false),
        };
        let started = record.map_or(finished, |record| record.started);
        let reason = reason.to_owned();
        self.blocking(move || {
            let message = message(&folder.join("message"), from_log.then_some(&*log));
            let exit = ExitRecord { started, finished: finished.max(started), exit_code, reason, message };
            fs::create_dir_all(&folder)?;
            fs::write(folder.join("exit.json"), serde_json::to_vec(&exit)?)?;
            Ok(exit)
        })
        .await
    }

    /// Asks a container to end, and kills it after `grace`.
    pub(crate) async fn stop(&self, id: &ContainerId, grace: Duration) -> Result<(), RuntimeError> {
        let mut changes = self.changes();
        let signal = self.containers.lock().get(id).map(|container| container.record.stop_signal);
        let Some(signal) = signal else { return Ok(()) };
        if !grace.is_zero() {
            self.kill(id, signal, false).await?;
            if self.ended(id, &mut changes, Instant::now() + grace).await {
                return Ok(());
            }
        }
        self.kill(id, SIGKILL, true).await?;
        match self.ended(id, &mut changes, Instant::now() + KILL_TIMEOUT).await {
            true => Ok(()),
            false => Err(RuntimeError::Internal(format!(
                "container {id} did not end within {} s of being killed",
                KILL_TIMEOUT.as_secs()
            ))),
        }
    }

    async fn ended(
        &self,
        id: &ContainerId,
        changes: &mut tokio::sync::watch::Receiver<u64>,
        deadline: Instant,
    ) -> bool {
        loop {
            if !matches!(self.state(id), Some(ContainerState::Running { .. })) {
                return true;
            }
            if timeout_at(deadline, changes.changed()).await.is_err() {
                return false;
            }
        }
    }

    pub(crate) async fn kill(&self, id: &ContainerId, signal: u32, all: bool) -> Result<(), RuntimeError> {
        let message = KillRequest { container_id: task_id(id), exec_id: String::new(), signal, all };
        let mut result = self.client().await?.tasks().kill(request(message.clone())).await;
        if result.as_ref().is_err_and(is_disconnected) {
            result = self.reconnect().await?.tasks().kill(request(message)).await;
        }
        match result {
            // It ended meanwhile.
            Err(status) if matches!(status.code(), Code::NotFound | Code::FailedPrecondition) => Ok(()),
            Err(status) if status.message().contains("process already finished") => Ok(()),
            result => result.map(|_| ()).map_err(failed("signal a container")),
        }
    }

    /// Removes a container's task, record and snapshot, whatever of them is there.
    pub(crate) async fn remove_container(
        &self,
        client: &Containerd,
        id: &ContainerId,
    ) -> Result<(), RuntimeError> {
        let task = task_id(id);
        let delete =
            async || client.tasks().delete(request(DeleteTaskRequest { container_id: task.clone() })).await;
        let mut deleted = or_absent(delete().await);
        if deleted.as_ref().is_err_and(|status| status.code() == Code::FailedPrecondition) {
            let kill = KillRequest {
                container_id: task.clone(),
                exec_id: String::new(),
                signal: SIGKILL,
                all: true,
            };
            let _ = client.tasks().kill(request(kill)).await;
            let wait = WaitRequest { container_id: task.clone(), exec_id: String::new() };
            let _ = tokio::time::timeout(KILL_TIMEOUT, client.tasks().wait(request(wait))).await;
            deleted = or_absent(delete().await);
        }
        deleted.map_err(failed("remove a task"))?;
        let removed = client.containers().delete(request(DeleteContainerRequest { id: task.clone() })).await;
        or_absent(removed).map_err(failed("remove a container"))?;
        let snapshot = RemoveSnapshotRequest { snapshotter: SNAPSHOTTER.into(), key: task };
        or_absent(client.snapshots().remove(request(snapshot)).await)
            .map_err(failed("remove a container's file system"))?;
        Ok(())
    }

    /// Forgets a pod's ended containers.
    pub(crate) async fn forget_containers(&self, uid: &PodUid) -> Result<(), RuntimeError> {
        let ids: Vec<_> = self.of_pod(uid).into_iter().map(|(id, _)| id).collect();
        let sockets: Vec<_> = ids.iter().map(|id| self.layout.attach_socket(id)).collect();
        self.containers.lock().retain(|id, _| id.pod != *uid);
        self.blocking(move || {
            sockets.iter().for_each(|socket| drop(fs::remove_file(socket)));
            Ok(())
        })
        .await
    }

    /// Writes a job's input into the container, in the background, and ends it there.
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
                    tracing::warn!(container = %id, %error, "cannot feed a container's input");
                },
                // One that ends without reading its input leaves the rest.
                _ = inner.ended(&id, &mut changes, Instant::now() + Duration::from_secs(u32::MAX.into())) => {}
            }
            inner.close_input(&client, &id, "").await;
        });
    }

    /// Ends the standard input of a process.
    pub(crate) async fn close_input(&self, client: &Containerd, id: &ContainerId, exec_id: &str) {
        let message = CloseIoRequest { container_id: task_id(id), exec_id: exec_id.into(), stdin: true };
        if let Err(error) = client.tasks().close_io(request(message)).await {
            tracing::debug!(container = %id, %error, "cannot end an input");
        }
    }
}

/// runc's words for a program that is not there are long; the whole text is kept.
fn start_failed(status: containerd_client::tonic::Status) -> RuntimeError {
    match status.code() {
        Code::Unavailable => RuntimeError::Internal(status.message().to_owned()),
        _ => RuntimeError::Invalid(format!("failed to create containerd task: {}", status.message())),
    }
}

/// containerd starts this program with the configuration's path for its arguments.
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

fn stop_signal(spec: &ContainerSpec, of_image: Option<String>) -> u32 {
    const SIGTERM: u32 = 15;
    let name = spec.process.stop_signal.clone().or(of_image).unwrap_or_default();
    let known = [
        ("HUP", 1),
        ("INT", 2),
        ("QUIT", 3),
        ("KILL", 9),
        ("USR1", 10),
        ("USR2", 12),
        ("TERM", 15),
        ("WINCH", 28),
        ("PWR", 30),
    ];
    let short = name.trim_start_matches("SIG");
    let by_name = known.iter().find(|(known, _)| *known == short).map(|(_, number)| *number);
    by_name.or_else(|| name.parse().ok()).unwrap_or(SIGTERM)
}

fn write_container_files(
    folder: &Path,
    record: &ContainerRecord,
    spec: &ContainerSpec,
    socket: std::path::PathBuf,
) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let log = LogShimConfig {
        log: spec.log_path.clone(),
        socket,
        capture: spec.files.as_ref().map(|files| files.capture.clone()),
    };
    fs::write(folder.join("log.json"), serde_json::to_vec(&log)?)?;
    fs::write(folder.join("container.json"), serde_json::to_vec(record)?)?;
    let message = folder.join("message");
    fs::write(&message, "")?;
    // The container's user writes it, whoever that is.
    fs::set_permissions(&message, fs::Permissions::from_mode(0o666))?;
    if record.stdin || record.has_input_file {
        let fifo = folder.join("stdin");
        match nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRUSR | nix::sys::stat::Mode::S_IWUSR) {
            Err(nix::errno::Errno::EEXIST) | Ok(()) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// What the container says about its end: its message file, else the end of its log.
fn message(file: &Path, log: Option<&Path>) -> String {
    let said = fs::read(file).unwrap_or_default();
    if !said.is_empty() {
        return String::from_utf8_lossy(&said[..said.len().min(MESSAGE_BYTES_MAX)]).into_owned();
    }
    let Some(log) = log else { return String::new() };
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().filter_map(|line| line.splitn(4, ' ').nth(3)).collect();
    let last = lines[lines.len().saturating_sub(MESSAGE_LOG_LINES_MAX)..].join("\n");
    let mut from = last.len().saturating_sub(MESSAGE_LOG_BYTES_MAX);
    while !last.is_char_boundary(from) {
        from += 1;
    }
    last[from..].to_owned()
}

/// The folders of a snapshot's layers, the topmost first.
fn layers(mounts: &[Mount]) -> Vec<std::path::PathBuf> {
    let Some(mount) = mounts.first() else { return Vec::new() };
    if mount.r#type == "bind" {
        return vec![mount.source.clone().into()];
    }
    let option = |name: &str| mount.options.iter().find_map(|option| option.strip_prefix(name));
    let upper = option("upperdir=").into_iter();
    let lower = option("lowerdir=").into_iter().flat_map(|folders| folders.split(':'));
    upper.chain(lower).map(Into::into).collect()
}

/// A file of an image, without following links out of it.
fn read_in(layers: &[std::path::PathBuf], path: &str) -> String {
    let files = layers.iter().map(|layer| layer.join(path));
    let found = files.into_iter().find(|file| file.symlink_metadata().is_ok_and(|found| found.is_file()));
    found.and_then(|file| fs::read_to_string(file).ok()).unwrap_or_default()
}

/// What a restarted process must know of a container. Blocks.
pub(crate) fn load<T: serde::de::DeserializeOwned>(
    layout: &Layout,
    id: &ContainerId,
    file: &str,
) -> Option<T> {
    serde_json::from_slice(&fs::read(layout.container(id).join(file)).ok()?).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_programs_argument_is_escaped() {
        let uri = log_uri(Path::new("/usr/bin/mayfly"), Path::new("/data dir/a&b/log.json"));
        assert_eq!(uri, "binary:///usr/bin/mayfly?log-shim=/data%20dir/a%26b/log.json");
    }

    #[test]
    fn an_ends_message_is_the_files_or_the_logs() {
        let folder = tempfile::tempdir().unwrap();
        let (file, log) = (folder.path().join("message"), folder.path().join("0.log"));
        fs::write(&log, "T stdout F first line\nT stderr F last: bad\n").unwrap();
        assert_eq!(message(&file, None), "");
        assert_eq!(message(&file, Some(&log)), "first line\nlast: bad");
        fs::write(&file, "said").unwrap();
        assert_eq!(message(&file, Some(&log)), "said");
        fs::write(&file, "x".repeat(5000)).unwrap();
        assert_eq!(message(&file, None).len(), MESSAGE_BYTES_MAX);
    }

    #[test]
    fn layers_of_a_snapshot() {
        let mount = |kind: &str, source: &str, options: &[&str]| Mount {
            r#type: kind.into(),
            source: source.into(),
            options: options.iter().map(|option| (*option).to_owned()).collect(),
            ..Mount::default()
        };
        let overlay = mount("overlay", "overlay", &["workdir=/w", "upperdir=/u", "lowerdir=/b:/a"]);
        assert_eq!(layers(&[overlay]), ["/u", "/b", "/a"].map(std::path::PathBuf::from));
        assert_eq!(layers(&[mount("bind", "/only", &["rw"])]), [std::path::PathBuf::from("/only")]);
    }
}
