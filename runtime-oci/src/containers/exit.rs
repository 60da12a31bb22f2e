//! The end of containers: wait, stop, exit record, cleanup.

use std::{
    fs,
    io::{self, Write as _},
    path::Path,
    sync::Arc,
    time::Duration,
};

use containerd_client::{
    services::v1::{
        DeleteContainerRequest, DeleteTaskRequest, KillRequest, WaitRequest, snapshots::RemoveSnapshotRequest,
    },
    tonic::Code,
};
use mayfly_runtime::{ContainerId, ContainerState, PodUid, RuntimeError};
use tokio::time::{Instant, sleep, timeout_at};

use super::{
    SIGKILL,
    files::{ExitRecord, message},
};
use crate::{
    cgroup,
    client::{Containerd, SNAPSHOTTER, failed, is_disconnected, or_absent, request},
    host::OciHost,
    layout::task_id,
};

/// The exit code of a killed process, as shells report it (128 + SIGKILL).
const EXIT_KILLED: i32 = 137;
/// The timeout for the end of a container after SIGKILL.
const KILL_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause before a failed request to containerd is repeated.
const RETRY_AFTER: Duration = Duration::from_millis(300);

/// Stores an exit record atomically. Blocks.
fn save(folder: &Path, exit: &ExitRecord) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut file = tempfile::NamedTempFile::new_in(folder)?;
    file.write_all(&serde_json::to_vec(exit)?)?;
    file.persist(folder.join("exit.json"))?;
    Ok(())
}

impl OciHost {
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

    /// Cleans up after an ended container, and stores its exit record.
    async fn finish(
        &self,
        id: &ContainerId,
        exit_code: i32,
        finished: jiff::Timestamp,
    ) -> Result<ExitRecord, RuntimeError> {
        let record = self.containers.lock().get(id).map(|container| container.record.clone());
        let folder = self.layout.container(id);
        let group = self.cgroup(id);
        let started = record.as_ref().map_or(finished, |record| record.started);
        // Stored before the task is removed: afterwards nothing else knows the exit code, if this process is killed.
        let exit = self.blocking({
            let folder = folder.clone();
            move || {
                if let Ok(text) = fs::read(folder.join("exit.json"))
                    && let Ok(exit) = serde_json::from_slice::<ExitRecord>(&text)
                {
                    return Ok(exit);
                }
                let reason = match (exit_code, group.is_some_and(|path| cgroup::was_out_of_memory(&path))) {
                    (0, _) => "Completed",
                    (_, true) => "OOMKilled",
                    (_, false) => "Error",
                };
                let (reason, finished) = (reason.to_owned(), finished.max(started));
                let exit = ExitRecord { started, finished, exit_code, reason, message: String::new() };
                save(&folder, &exit)?;
                Ok(exit)
            }
        });
        let mut exit = exit.await?;
        let client = self.client().await?;
        if let Err(error) = self.remove_container(&client, id).await {
            self.reconnect().await?;
            return Err(error);
        }
        let (log, from_log) = match record {
            Some(record) => (record.log, record.message_from_log && exit.exit_code != 0),
            None => (Default::default(), false),
        };
        self.blocking(move || {
            // The log is complete once the task is removed.
            exit.message = message(&folder.join("message"), from_log.then_some(&*log));
            save(&folder, &exit)?;
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

    pub(super) async fn ended(
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
            // The container has ended meanwhile.
            Err(status) if matches!(status.code(), Code::NotFound | Code::FailedPrecondition) => Ok(()),
            Err(status) if status.message().contains("process already finished") => Ok(()),
            result => result.map(|_| ()).map_err(failed("signal a container")),
        }
    }

    /// Removes a container's task, record and snapshot, if they exist.
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

    /// Removes a pod's ended containers from the tables.
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
}
