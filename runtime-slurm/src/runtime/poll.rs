//! The task that polls the states of all jobs, and the task that copies their output. They are separate, because a
//! command of Slurm takes long while the controller does not answer.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use jiff::Timestamp;
use mayfly_runtime::PodUid;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::{SlurmHost, blocking, job::SlurmJob};
use crate::{
    log_copy,
    output::{self, SlurmQueueEntry},
    record::{self, EndRecord, JobRecord},
    script,
    state::{ContainerEnd, JobEnd, JobPhase, SlurmJobId},
};

/// The interval at which the jobs' output is copied into the logs.
const COPY_EVERY: Duration = Duration::from_millis(250);
/// The polling interval while a caller waits for a job's end.
const POLL_EVERY_HURRIED: Duration = Duration::from_millis(500);
/// The time after which a job counts as lost, if Slurm does not know it and it left no exit code. A machine may write
/// the exit code late through a network file system.
const LOST_AFTER: Duration = Duration::from_secs(30);

/// A job that had not ended before the poll began.
struct OpenJob {
    pod: PodUid,
    job: Arc<SlurmJob>,
    id: SlurmJobId,
}

/// Copies the output of running jobs until `stop`.
pub(super) async fn copy_until(host: Arc<SlurmHost>, stop: CancellationToken) {
    loop {
        copy_outputs(&host).await;
        tokio::select! {
            () = stop.cancelled() => return,
            () = sleep(COPY_EVERY) => {}
        }
    }
}

/// Polls until `stop`.
pub(super) async fn poll_until(host: Arc<SlurmHost>, every: Duration, stop: CancellationToken) {
    let mut polled: Option<Instant> = None;
    let mut has_failed = false;
    loop {
        let pause = if host.waiting_for_ends.load(Ordering::Relaxed) > 0 {
            every.min(POLL_EVERY_HURRIED)
        } else {
            every
        };
        let due = polled.map_or(Duration::ZERO, |at| pause.saturating_sub(at.elapsed()));
        if due.is_zero() {
            // Listed before the query, so that a job submitted meanwhile, which the answer lacks, is not considered
            // missing.
            let open = open_jobs(&host);
            if !open.is_empty() {
                let done = poll(&host, open).await;
                match &done {
                    Err(error) if !has_failed => {
                        tracing::warn!(%error, "cannot list Slurm's jobs; they keep their last state");
                    }
                    Ok(()) if has_failed => tracing::info!("Slurm answers again"),
                    _ => {}
                }
                has_failed = done.is_err();
            }
            polled = Some(Instant::now());
            continue;
        }
        tokio::select! {
            () = stop.cancelled() => return,
            woken = timeout(due, host.wake.notified()) => if woken.is_ok() { polled = None },
        }
    }
}

fn open_jobs(host: &SlurmHost) -> Vec<OpenJob> {
    let jobs = host.jobs().into_iter();
    jobs.filter_map(|(pod, job)| Some(OpenJob { pod, id: job.open_id()?, job })).collect()
}

async fn poll(host: &SlurmHost, open: Vec<OpenJob>) -> Result<(), crate::commands::SlurmError> {
    let queue = host.commands.queue(None).await?;
    let mut named: HashMap<&str, Vec<&SlurmQueueEntry>> = HashMap::new();
    for job in &queue {
        named.entry(&job.name).or_default().push(job);
    }
    let mut ended = Vec::new();
    let mut is_news = false;
    for one in open {
        let name = script::job_name(&one.job.record().id(&one.pod));
        let of_name = named.get(name.as_str()).map(Vec::as_slice).unwrap_or_default();
        if of_name.len() > 1 && choose_one(host, &one, of_name).await {
            continue;
        }
        let known = of_name.iter().find(|known| known.id == one.id);
        match known.map(|known| (known, known.state.phase())) {
            Some((known, JobPhase::Queued)) => is_news |= one.job.set_waiting(waiting(known)),
            Some((known, JobPhase::Active)) => {
                let started = known.started_s.and_then(timestamp).unwrap_or_else(Timestamp::now);
                if one.job.set_started(started) {
                    is_news = true;
                    if let Err(error) = host.save(&one.pod, &one.job).await {
                        // The next poll reads it again.
                        tracing::warn!(job = %one.id, %error, "cannot record that a job has started");
                    }
                }
            }
            Some((_, JobPhase::Ended)) | None => ended.push(one),
        }
    }
    if is_news {
        host.changed();
    }
    if ended.is_empty() {
        return Ok(());
    }
    let ids: Vec<_> = ended.iter().map(|one| one.id).collect();
    let ends = host.commands.ends(&ids).await?;
    for one in ended {
        finish(host, &one, ends.get(&one.id)).await;
    }
    host.changed();
    Ok(())
}

/// Handles several jobs of one container, which exist after a submission with an unknown result was repeated. Chooses
/// one and cancels the others. Returns whether the chosen job differs from the recorded one.
async fn choose_one(host: &SlurmHost, one: &OpenJob, named: &[&SlurmQueueEntry]) -> bool {
    let folder = host.folder.container(&one.job.record().id(&one.pod));
    let claimed = blocking(move || record::claim(&folder)).await;
    let Some(chosen) = record::choose(claimed, Some(one.id), named) else { return false };
    for other in named.iter().filter(|other| other.id != chosen && other.state.phase() != JobPhase::Ended) {
        tracing::warn!(job = %other.id, name = other.name, "cancelling a second job of a container");
        if let Err(error) = host.commands.cancel(other.id).await {
            tracing::warn!(job = %other.id, %error, "cannot cancel a second job of a container; it has no effect");
        }
    }
    if chosen == one.id {
        return false;
    }
    one.job.set_id(chosen);
    if let Err(error) = host.save(&one.pod, &one.job).await {
        tracing::warn!(job = %chosen, %error, "cannot record the job of a container");
    }
    true
}

/// Completes the log and the outputs, and records the end; only then does the end become visible.
async fn finish(host: &SlurmHost, one: &OpenJob, end: Option<&JobEnd>) {
    let record = one.job.record();
    let folder = host.folder.container(&record.id(&one.pod));
    let (noted, stderr) = {
        let folder = folder.clone();
        blocking(move || (record::recorded_exit(&folder), log_copy::stderr_tail(&folder))).await
    };
    let missing_for = one.job.set_missing(Instant::now()).elapsed();
    let end = end.cloned().map(|end| match end.signal != 0 && output::is_memory_exceeded(&stderr) {
        true => end.with_memory_exceeded(),
        false => end,
    });
    let Some((started, end)) = end_of(&record, one.id, end.as_ref(), noted, missing_for) else { return };
    let completed = {
        let (job, record, folder) = (one.job.clone(), record.clone(), folder.clone());
        blocking(move || complete(&job, &record, &folder)).await
    };
    if let Err(error) = completed {
        tracing::warn!(job = %one.id, %error, "cannot copy the output of an ended job; will try again");
        return;
    }
    let saved = {
        let mut record = record;
        (record.started, record.end) = (Some(started), Some(end.clone()));
        let (folder, pod) = (host.folder.clone(), one.pod.clone());
        blocking(move || folder.save_job(&pod, &record)).await
    };
    if let Err(error) = saved {
        tracing::warn!(job = %one.id, %error, "cannot record the end of a job; will try again");
        return;
    }
    one.job.set_end(started, end);
}

/// The start and the end of a container: as Slurm reports it, else from the exit code that its script wrote; `None`
/// while either may still arrive. Pure.
fn end_of(
    record: &JobRecord,
    id: SlurmJobId,
    end: Option<&JobEnd>,
    noted: Option<(i32, Timestamp)>,
    missing_for: Duration,
) -> Option<(Timestamp, EndRecord)> {
    let (end, started, finished) = match (end, noted) {
        (Some(end), _) => {
            let finished = end.finished_s.and_then(timestamp);
            (end.container_end(id), end.started_s.and_then(timestamp), finished)
        }
        (None, Some((exit_code, at))) => {
            let reason = if exit_code == 0 { "Completed" } else { "Error" };
            let message = String::new();
            (ContainerEnd { exit_code, reason: reason.into(), message }, None, Some(at))
        }
        (None, None) if missing_for >= LOST_AFTER => {
            let message = format!("Slurm does not know job {id} any more, and its script wrote no exit code");
            (ContainerEnd { exit_code: 137, reason: "JobLost".into(), message }, None, None)
        }
        (None, None) => return None,
    };
    let finished = finished.unwrap_or_else(Timestamp::now);
    let started = record.started.or(started).unwrap_or(finished).min(finished);
    Some((started, EndRecord { end, finished }))
}

fn complete(job: &SlurmJob, record: &JobRecord, folder: &Path) -> std::io::Result<()> {
    job.copy.lock().finish(folder, &record.log)?;
    record.capture.as_ref().map_or(Ok(()), |capture| log_copy::capture(folder, capture))
}

/// Copies new output of running jobs.
async fn copy_outputs(host: &SlurmHost) {
    let running: Vec<_> = host
        .jobs()
        .into_iter()
        .filter(|(_, job)| job.has_started() && !job.has_ended())
        .map(|(pod, job)| {
            let record = job.record();
            (job, host.folder.container(&record.id(&pod)), record.log)
        })
        .collect();
    if running.is_empty() {
        return;
    }
    blocking(move || {
        for (job, folder, log) in running {
            let advanced = job.copy.lock().advance(&folder, &log);
            if let Err(error) = advanced {
                tracing::debug!(log = %log.display(), %error, "cannot copy a job's output; will try again");
            }
        }
    })
    .await;
}

fn waiting(job: &SlurmQueueEntry) -> String {
    match job.reason.as_str() {
        "" => job.state.as_str().to_owned(),
        reason => format!("{} ({reason})", job.state.as_str()),
    }
}

fn timestamp(seconds: i64) -> Option<Timestamp> {
    Timestamp::from_second(seconds).ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::SlurmState;

    fn record(started: Option<&str>) -> JobRecord {
        JobRecord {
            container: "main".into(),
            attempt: 0,
            log: "/log".into(),
            capture: None,
            stop_signal: "TERM".into(),
            job: Some(SlurmJobId(1)),
            started: started.map(|text| text.parse().unwrap()),
            end: None,
        }
    }

    #[test]
    fn the_state_from_slurm_takes_precedence_over_the_recorded_exit_code() {
        let noted = Some((0, Timestamp::from_second(30).unwrap()));
        let end = JobEnd {
            state: SlurmState::parse("OUT_OF_MEMORY"),
            reason: String::new(),
            exit_code: 0,
            signal: 9,
            started_s: Some(10),
            finished_s: Some(20),
        };
        let (started, ended) =
            end_of(&record(None), SlurmJobId(1), Some(&end), noted, Duration::ZERO).unwrap();
        assert_eq!((ended.end.exit_code, ended.end.reason.as_str()), (137, "OOMKilled"));
        assert_eq!((started.as_second(), ended.finished.as_second()), (10, 20));
    }

    #[test]
    fn a_job_unknown_to_slurm_ends_with_the_recorded_exit_code() {
        let noted = Some((4, Timestamp::from_second(30).unwrap()));
        let known = record(Some("1970-01-01T00:00:05Z"));
        let (started, ended) = end_of(&known, SlurmJobId(1), None, noted, Duration::ZERO).unwrap();
        assert_eq!((ended.end.exit_code, ended.end.reason.as_str()), (4, "Error"));
        assert_eq!((started.as_second(), ended.finished.as_second()), (5, 30));
    }

    #[test]
    fn a_job_without_a_trace_is_lost_after_a_while() {
        let end = |missing_for| end_of(&record(None), SlurmJobId(1), None, None, missing_for);
        assert_eq!(end(Duration::ZERO), None);
        let (_, lost) = end(LOST_AFTER).unwrap();
        assert_eq!((lost.end.exit_code, lost.end.reason.as_str()), (137, "JobLost"));
    }
}
