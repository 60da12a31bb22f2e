//! The Job of `mayfly gpu run` as a value.

use std::{collections::BTreeMap, str::FromStr, time::Duration};

use mayfly_api::{
    job_io::{
        ANNOTATION_GPU_SECONDS, ANNOTATION_INPUTS, ARTIFACTS, ArtifactRef, FOLDER_IN, FOLDER_OUT, Inputs,
        gpu_ms,
    },
    job_queue::LABEL_QUEUE,
    k8s::apimachinery::pkg::api::resource::Quantity,
    quantity,
};
use serde_json::{Map, Value, json};

use crate::failure::{ErrorCode, Failure};

/// One unit of `mayfly.dev/vcuda-memory`, in bytes.
const MEMORY_UNIT_BYTES: u64 = 256 << 20;
/// The units of `mayfly.dev/vcuda-core` for one GPU.
const CORES_PER_GPU: f64 = 100.0;
/// The working folder of the container: a writable copy of the sources.
const FOLDER_WORK: &str = "/work";
/// The time to live of a finished Job in seconds, as for workflows: a week.
const TTL_SECONDS: u32 = 7 * 24 * 3600;
/// The length limit of a name that the server extends by a suffix, in bytes.
const STEM_BYTES_MAX: usize = 40;

/// `--gpus`: whole GPUs, or a percentage of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum GpuAmount {
    Whole(u32),
    Percent(u32),
}

impl FromStr for GpuAmount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if let Ok(whole @ 1..) = text.parse() {
            return Ok(Self::Whole(whole));
        }
        let share: f64 = text.parse().unwrap_or(0.0);
        // At most 100 and at least 1: the cast is exact.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked below")]
        let percent = (share * CORES_PER_GPU).round() as u32;
        match percent {
            1..100 if share < 1.0 => Ok(Self::Percent(percent)),
            _ => Err("expected a number of GPUs, or a share between 0.01 and 0.99".to_owned()),
        }
    }
}

/// The container's limits.
///
/// # Errors
/// A share without memory, memory without a share, or an invalid quantity.
pub(super) fn limits(gpus: GpuAmount, memory: Option<&str>) -> anyhow::Result<Value> {
    match (gpus, memory) {
        (GpuAmount::Whole(count), None) => Ok(json!({"nvidia.com/gpu": count.to_string()})),
        (GpuAmount::Whole(_), Some(_)) => Err(Failure::error(
            ErrorCode::Usage,
            "a whole GPU has all of its memory",
            "leave --gpu-memory out, or ask for a share: --gpus 0.5",
        )),
        (GpuAmount::Percent(_), None) => Err(Failure::error(
            ErrorCode::Usage,
            "a share of a GPU needs its memory",
            "say how much: --gpu-memory 8Gi",
        )),
        (GpuAmount::Percent(percent), Some(memory)) => {
            let bytes = quantity::whole(&Quantity(memory.to_owned())).map_err(|why| {
                Failure::error(
                    ErrorCode::Usage,
                    format!("--gpu-memory {memory:?}: {why}"),
                    "write a quantity, such as 8Gi",
                )
            })?;
            let units = bytes.div_ceil(MEMORY_UNIT_BYTES).to_string();
            Ok(json!({"mayfly.dev/vcuda-core": percent.to_string(), "mayfly.dev/vcuda-memory": units}))
        }
    }
}

/// The inputs of the Job.
pub(super) struct GpuJobPlan {
    pub(super) name: Option<String>,
    /// The prefix of the generated name.
    pub(super) stem: String,
    pub(super) image: String,
    pub(super) command: Vec<String>,
    /// The folder of the sources in which the command runs; empty: the root.
    pub(super) folder: String,
    /// Source files to be made executable: an artifact of one file has no permissions.
    pub(super) executables: Vec<String>,
    pub(super) limits: Value,
    /// The JobQueue in which it waits.
    pub(super) queue: Option<String>,
}

impl GpuJobPlan {
    /// The `batch/v1` Job for these sources.
    ///
    /// # Errors
    /// A source whose name cannot be a file name in the container.
    pub(super) fn manifest(&self, artifacts: BTreeMap<String, ArtifactRef>) -> anyhow::Result<Value> {
        let artifacts = artifacts.into_iter().map(|(name, artifact)| (name, artifact.into())).collect();
        let inputs = Inputs { artifacts, ..Inputs::default() };
        inputs.check().map_err(|why| Failure::error(ErrorCode::Usage, why, "rename the source"))?;
        let mut metadata = match &self.name {
            Some(name) => json!({"name": name}),
            None => json!({"generateName": format!("{}-", label(&self.stem))}),
        };
        if let Some(queue) = &self.queue {
            metadata["labels"] = json!({LABEL_QUEUE: queue});
        }
        let kept = format!("{FOLDER_OUT}/{ARTIFACTS}");
        let quoted = |name: &String| format!(" ./'{}'", name.replace('\'', r"'\''"));
        let executable = match self.executables.iter().map(quoted).collect::<String>() {
            names if names.is_empty() => names,
            names => format!(" && chmod +x{names}"),
        };
        let script = format!(
            "mkdir -p {kept} && cp -R {FOLDER_IN}/. {FOLDER_WORK}/ && cd {FOLDER_WORK}/\"$0\"{executable} && \
             exec \"$@\""
        );
        let arguments = ["sh", "-c", &script, &self.folder];
        let command: Vec<&str> =
            arguments.into_iter().chain(self.command.iter().map(String::as_str)).collect();
        let container = json!({
            "name": "job", "image": self.image, "command": command,
            "env": [{"name": "MAYFLY_OUT", "value": kept}],
            "volumeMounts": [{"name": "work", "mountPath": FOLDER_WORK}],
            "resources": {"limits": self.limits}});
        let annotations =
            Map::from_iter([(ANNOTATION_INPUTS.to_owned(), serde_json::to_string(&inputs)?.into())]);
        Ok(json!({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": {
            "backoffLimit": 0, "ttlSecondsAfterFinished": TTL_SECONDS,
            "template": {"metadata": {"annotations": annotations}, "spec": {
                "restartPolicy": "Never", "volumes": [{"name": "work", "emptyDir": {}}],
                "containers": [container]}}}}))
    }
}

/// Converts a text to a prefix for an object's name.
fn label(text: &str) -> String {
    let lower = text.to_ascii_lowercase();
    let mut name: String =
        lower.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).take(STEM_BYTES_MAX).collect();
    name = name.trim_matches('-').to_owned();
    if name.is_empty() { "job".to_owned() } else { name }
}

/// Whether a Job is complete or failed.
pub(super) fn has_ended(job: &Value) -> bool {
    let conditions = job["status"]["conditions"].as_array().map_or(&[][..], Vec::as_slice);
    conditions.iter().any(|condition| {
        matches!(condition["type"].as_str(), Some("Complete" | "Failed")) && condition["status"] == "True"
    })
}

/// The GPU time of all pods of a Job together; `None`: they had no GPU.
pub(super) fn gpu_time(job: &Value) -> Option<Duration> {
    job["metadata"]["annotations"][ANNOTATION_GPU_SECONDS]
        .as_str()
        .and_then(gpu_ms)
        .map(Duration::from_millis)
}

/// The line about the GPU time of a Job with a number of pods. `wall`: how long the last one ran, if it is known.
pub(super) fn gpu_time_line(used: Duration, pods: usize, wall: Option<Duration>) -> String {
    let seconds = |time: Duration| format!("{:.1} s", time.as_secs_f64());
    match wall.filter(|_| pods == 1) {
        Some(wall) => format!("{} of GPU time in {}", seconds(used), seconds(wall)),
        None => format!("{} of GPU time in {pods} pods", seconds(used)),
    }
}

/// The queue in which a suspended Job waits.
pub(super) fn waits_in_queue(job: &Value) -> Option<&str> {
    let queue = job["metadata"]["labels"][LABEL_QUEUE].as_str()?;
    (job["spec"]["suspend"] == true).then_some(queue)
}

/// The reason why a pod has not started, as reported by the scheduler or the kubelet.
pub(super) fn waiting_reason(pod: &Value) -> Option<String> {
    let of = |value: &Value| {
        let message = value["message"].as_str().filter(|message| !message.is_empty());
        message.or(value["reason"].as_str()).map(str::to_owned)
    };
    let conditions = pod["status"]["conditions"].as_array().map_or(&[][..], Vec::as_slice);
    let unscheduled = conditions
        .iter()
        .find(|condition| condition["type"] == "PodScheduled" && condition["status"] == "False");
    let waiting = &pod["status"]["containerStatuses"][0]["state"]["waiting"];
    let is_usual = matches!(waiting["reason"].as_str(), None | Some("ContainerCreating"));
    unscheduled.and_then(of).or_else(|| of(waiting).filter(|_| !is_usual))
}

#[cfg(test)]
mod tests {
    use mayfly_api::Digest;

    use super::*;

    #[test]
    fn shares_and_whole_gpus() {
        assert_eq!("2".parse(), Ok(GpuAmount::Whole(2)));
        assert_eq!("0.5".parse(), Ok(GpuAmount::Percent(50)));
        for wrong in ["0", "-1", "1.5", "0.001", "NaN", "inf", "half"] {
            wrong.parse::<GpuAmount>().expect_err(wrong);
        }
        assert_eq!(limits(GpuAmount::Whole(2), None).unwrap(), json!({"nvidia.com/gpu": "2"}));
        assert_eq!(
            limits(GpuAmount::Percent(50), Some("8Gi")).unwrap(),
            json!({"mayfly.dev/vcuda-core": "50", "mayfly.dev/vcuda-memory": "32"})
        );
        limits(GpuAmount::Percent(50), None).expect_err("a share needs memory");
        limits(GpuAmount::Percent(50), Some("much")).expect_err("no quantity");
        limits(GpuAmount::Whole(1), Some("8Gi")).expect_err("a whole GPU has its memory");
    }

    #[test]
    fn the_job_runs_the_command_in_a_copy_of_the_sources() {
        let plan = GpuJobPlan {
            name: None,
            stem: "Train_1".into(),
            image: "builder:1".into(),
            command: vec!["make".into(), "run".into()],
            folder: "train".into(),
            executables: vec!["it's".into()],
            limits: json!({"nvidia.com/gpu": "1"}),
            queue: Some("q".into()),
        };
        let source = ArtifactRef { digest: Digest::of(b"x"), directory: true, bytes: None };
        let job = plan.manifest(BTreeMap::from([("train".to_owned(), source.clone())])).unwrap();
        assert_eq!(job["metadata"]["generateName"], "train-1-");
        assert_eq!(job["metadata"]["labels"]["mayfly.dev/queue"], "q");
        let template = &job["spec"]["template"];
        let inputs = template["metadata"]["annotations"][ANNOTATION_INPUTS].as_str().unwrap();
        assert_eq!(Inputs::parse(inputs.as_bytes()).unwrap().artifacts["train"], source.clone().into());
        let command = template["spec"]["containers"][0]["command"].as_array().unwrap();
        assert_eq!(command[3..], ["train", "make", "run"]);
        let script = command[2].as_str().unwrap();
        assert!(script.ends_with(r#"/"$0" && chmod +x ./'it'\''s' && exec "$@""#), "{script}");
        plan.manifest(BTreeMap::from([(".hidden".to_owned(), source)])).expect_err("no file name");
    }

    #[test]
    fn the_gpu_time_is_that_of_all_pods() {
        let job = json!({"metadata": {"annotations": {"mayfly.dev/gpu-seconds": "61.250"}}});
        let used = gpu_time(&job).unwrap();
        assert_eq!(used, Duration::from_millis(61_250));
        assert_eq!(gpu_time(&json!({"metadata": {}})), None);
        let wall = Some(Duration::from_millis(70_000));
        assert_eq!(gpu_time_line(used, 1, wall), "61.2 s of GPU time in 70.0 s");
        assert_eq!(gpu_time_line(used, 3, wall), "61.2 s of GPU time in 3 pods");
    }

    #[test]
    fn the_reason_of_a_pod_that_waits() {
        let pod = json!({"status": {"conditions": [
            {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available"}]}});
        assert_eq!(waiting_reason(&pod).unwrap(), "0/1 nodes are available");
        let waiting = |reason: &str| {
            waiting_reason(
                &json!({"status": {"containerStatuses": [{"state": {"waiting": {"reason": reason}}}]}}),
            )
        };
        assert_eq!(waiting("ImagePullBackOff").unwrap(), "ImagePullBackOff");
        assert_eq!(waiting("ContainerCreating"), None);
    }
}
