//! Adoption of the sandboxes and containers of an earlier process: sandboxes by their files, containers by their
//! records and tasks.

use std::{collections::HashMap, fs, path::PathBuf, sync::Arc};

use containerd_client::services::v1::{Container, ListContainersRequest, ListTasksRequest};
use containerd_client::types::v1::{Process, Status};
use mayfly_runtime::{ContainerId, ContainerState, PodUid, RuntimeError};

use crate::{
    client::{failed, request},
    containers::{ContainerRecord, ExitRecord, LABEL_ATTEMPT, LABEL_NAME, LABEL_POD, Tracked, load},
    daemon,
    host::OciHost,
    layout::task_id,
    sandbox::Sandbox,
};

/// The action for a discovered container.
#[derive(Debug, PartialEq)]
enum Adoption {
    /// The container runs, or has ended without an exit record: wait for its end.
    Watch(ContainerRecord),
    /// The container's start or removal was interrupted.
    Remove,
}

/// Fills the runtime's tables. Does nothing if there is no sandbox.
pub(crate) async fn adopt(inner: &Arc<OciHost>) -> Result<(), RuntimeError> {
    let layout = inner.layout.clone();
    let (sandboxes, exits) = inner
        .blocking(move || {
            let folders = fs::read_dir(layout.pods()).into_iter().flatten().flatten();
            let folders: Vec<PathBuf> = folders.map(|entry| entry.path()).collect();
            let sandboxes: Vec<Sandbox> = folders.iter().filter_map(|folder| read_sandbox(folder)).collect();
            let exits: Vec<_> = sandboxes
                .iter()
                .flat_map(|sandbox| read_exits(&layout.pod(&sandbox.uid()), &sandbox.uid()))
                .collect();
            Ok((sandboxes, exits))
        })
        .await?;
    if sandboxes.is_empty() {
        // A containerd without pods remains from a killed process; reuse it for the first pod.
        daemon::find(&inner.layout).await;
        return Ok(());
    }
    tracing::info!(sandboxes = sandboxes.len(), "taking over the pods of an earlier process");
    inner.sandboxes.lock().extend(sandboxes.into_iter().map(|sandbox| (sandbox.uid(), sandbox)));
    for (id, record, exit) in exits {
        inner.containers.lock().insert(id, Tracked { state: exit.into(), record });
    }
    // No container can be started in a sandbox whose namespaces a restart of the machine has removed: the kubelet makes
    // the sandbox again.
    let unusable: Vec<PodUid> = {
        let known = inner.sandboxes.lock();
        let is_usable = |sandbox: &Sandbox| sandbox.is_complete() && sandbox.has_namespaces(&inner.layout);
        known.values().filter(|sandbox| !is_usable(sandbox)).map(Sandbox::uid).collect()
    };
    for uid in unusable {
        inner.forget_containers(&uid).await?;
        inner.drop_sandbox(&uid).await?;
    }
    let client = inner.client().await?;
    let containers = client.containers().list(request(ListContainersRequest::default())).await;
    let tasks = client.tasks().list(request(ListTasksRequest::default())).await;
    let tasks = tasks.map_err(failed("list tasks"))?.into_inner().tasks;
    // A task's `id` is that of its container.
    let tasks: HashMap<String, Process> = tasks.into_iter().map(|task| (task.id.clone(), task)).collect();
    for container in containers.map_err(failed("list containers"))?.into_inner().containers {
        let Some(id) = id_of(&container) else { continue };
        let is_known = inner.sandboxes.lock().contains_key(&id.pod);
        let record = load::<ContainerRecord>(&inner.layout, &id, "container.json").filter(|_| is_known);
        match decide(record, tasks.get(&container.id)) {
            Adoption::Watch(record) => {
                let state = ContainerState::Running { started: record.started };
                let has_input = record.has_input_file;
                inner.containers.lock().insert(id.clone(), Tracked { state, record });
                inner.watch_exit(id.clone());
                if has_input {
                    // The process that wrote its input has ended.
                    inner.close_input(&client, &id, "").await;
                }
            }
            Adoption::Remove => inner.remove_container(&client, &id).await?,
        }
    }
    Ok(())
}

fn decide(record: Option<ContainerRecord>, task: Option<&Process>) -> Adoption {
    let was_started = task.is_some_and(|task| {
        matches!(task.status(), Status::Running | Status::Stopped | Status::Paused | Status::Pausing)
    });
    match record.filter(|_| was_started) {
        Some(record) => Adoption::Watch(record),
        None => Adoption::Remove,
    }
}

fn read_sandbox(folder: &std::path::Path) -> Option<Sandbox> {
    match Sandbox::load(&folder.join("sandbox.json")) {
        Ok(sandbox) => Some(sandbox),
        Err(error) => {
            tracing::warn!(folder = %folder.display(), %error, "cannot read a sandbox's file; leaving it");
            None
        }
    }
}

/// The containers of a pod that have ended.
fn read_exits(folder: &std::path::Path, uid: &PodUid) -> Vec<(ContainerId, ContainerRecord, ExitRecord)> {
    let folders = fs::read_dir(folder).into_iter().flatten().flatten();
    folders
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let (name, attempt) = name.rsplit_once('_')?;
            let id = ContainerId { pod: uid.clone(), name: name.into(), attempt: attempt.parse().ok()? };
            let read = |file: &str| fs::read(entry.path().join(file)).ok();
            let record = serde_json::from_slice(&read("container.json")?).ok()?;
            let exit = serde_json::from_slice(&read("exit.json")?).ok()?;
            Some((id, record, exit))
        })
        .collect()
}

fn id_of(container: &Container) -> Option<ContainerId> {
    let label = |name: &str| container.labels.get(name).cloned();
    let id = ContainerId {
        pod: PodUid(label(LABEL_POD)?),
        name: label(LABEL_NAME)?,
        attempt: label(LABEL_ATTEMPT)?.parse().ok()?,
    };
    (task_id(&id) == container.id).then_some(id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_started_containers_are_adopted() {
        let record = || ContainerRecord {
            started: jiff::Timestamp::UNIX_EPOCH,
            tty: false,
            stdin: false,
            stdin_once: false,
            has_input_file: false,
            stop_signal: 15,
            log: "/log".into(),
            message_from_log: false,
        };
        let task = |status: Status| Process { status: status as i32, ..Process::default() };
        for (status, watched) in [
            (Status::Running, true),
            (Status::Stopped, true),
            (Status::Created, false),
            (Status::Unknown, false),
        ] {
            let found = decide(Some(record()), Some(&task(status)));
            assert_eq!(found == Adoption::Watch(record()), watched, "{status:?}");
        }
        assert_eq!(decide(Some(record()), None), Adoption::Remove);
        assert_eq!(decide(None, Some(&task(Status::Running))), Adoption::Remove);
    }
}
