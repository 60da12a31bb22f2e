//! The arguments of a task, and the Job that is created from them; pure.

use std::collections::BTreeMap;

use mayfly_api::{
    Digest, ObjectKey,
    egress::EgressRule,
    job_io::{ANNOTATION_INPUTS, ArtifactTarget, FOLDER_IN, InputArtifact, Inputs},
    k8s::api::batch::v1::Job,
    names,
    wellknown::{self, ANNOTATION_EGRESS, LABEL_WORKFLOW},
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::memo;

/// On a Job: the task that it is of.
const ANNOTATION_KEY: &str = "mayfly.dev/task";
/// On a Job: the execution that it is of.
const ANNOTATION_EXECUTION: &str = "mayfly.dev/execution";
/// On a Job: its task waits for its end (`"true"`), so it does not outlive its execution.
const ANNOTATION_AWAITED: &str = "mayfly.dev/awaited";
/// The default time for which a Job and its outputs are kept after its end: a week, in seconds.
const TTL_SECONDS_DEFAULT: i64 = 7 * 24 * 3600;
/// The one container.
const CONTAINER: &str = "job";
/// The image of a container whose runtime class takes none.
const IMAGE_NONE: &str = "none";
/// The input artifact that holds a script's source.
const SCRIPT: &str = "script";
/// The default interpreter of a script.
const INTERPRETER_DEFAULT: &str = "sh";

/// The task's arguments, as they are written.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
struct Written {
    component: Option<String>,
    image: Option<String>,
    runtime_class: Option<String>,
    namespace: Option<String>,
    #[serde(default)]
    command: Vec<String>,
    /// Source text that an interpreter of the image runs.
    script: Option<String>,
    #[serde(default)]
    interpreter: Vec<String>,
    #[serde(default)]
    args: Vec<Value>,
    #[serde(default)]
    env: BTreeMap<String, Value>,
    #[serde(default)]
    parameters: BTreeMap<String, Value>,
    #[serde(default)]
    artifacts: BTreeMap<String, WrittenArtifact>,
    #[serde(default)]
    targets: BTreeMap<String, ArtifactTarget>,
    completions: Option<i32>,
    parallelism: Option<i32>,
    indexed: Option<bool>,
    backoff_limit: Option<i32>,
    deadline_seconds: Option<i64>,
    ttl_seconds: Option<i64>,
    memory: Option<String>,
    cpu: Option<String>,
    #[serde(default)]
    egress: Vec<String>,
    memoize: Option<Memoize>,
}

/// A Job that has done the same before answers in the place of a new one.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase", deny_unknown_fields)]
pub(super) struct Memoize {
    /// In place of the program and its inputs; within the state machine.
    key: Option<Value>,
    /// An older result is not used.
    pub(super) max_age_seconds: Option<u64>,
}

/// A digest alone is a file; what an earlier job gave is taken as it is.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum WrittenArtifact {
    Digest(Digest),
    Ref(Box<InputArtifact>),
}

/// The program of the Job.
#[derive(Debug, PartialEq)]
pub(super) enum Program {
    Component(Digest),
    /// With the runtime class, where the task names one.
    Image {
        image: String,
        runtime_class: Option<String>,
    },
}

/// The task's arguments, understood.
#[derive(Debug)]
pub(super) struct Arguments {
    pub(super) namespace: String,
    pub(super) program: Program,
    pub(super) inputs: Inputs,
    /// Whether the answer tells of one pod or of several.
    pub(super) single: bool,
    spec: Value,
    container: Value,
    egress: String,
    memoize: Option<Memoize>,
}

impl Arguments {
    /// # Errors
    /// In words: what is wrong with the arguments.
    pub(super) fn parse(arguments: &Value) -> Result<Self, String> {
        let written = Written::deserialize(arguments).map_err(|error| error.to_string())?;
        let program = match (&written.component, &written.image, &written.runtime_class) {
            (Some(digest), None, None) => Program::Component(digest.parse().map_err(|error| {
                format!("Component: {error}; mayfly artifact push FILE prints it, and mayfly workflow deploy takes \
                         the path of a .wasm file in its place")
            })?),
            (None, image, Some(class)) => {
                names::dns_subdomain(class).map_err(|why| format!("RuntimeClass {class:?}: {why}"))?;
                // A batch system's jobs need no image, and the API wants a name.
                let image = image.clone().unwrap_or_else(|| IMAGE_NONE.to_owned());
                Program::Image { image, runtime_class: Some(class.clone()) }
            }
            (None, Some(image), None) => Program::Image { image: image.clone(), runtime_class: None },
            (Some(_), None, Some(_)) => return Err("RuntimeClass: a Component runs in the class wasm".into()),
            _ => return Err("one of Component and Image is required".into()),
        };
        let namespace = written.namespace.clone().unwrap_or_else(|| wellknown::NAMESPACE_DEFAULT.into());
        names::dns_label(&namespace).map_err(|why| format!("Namespace {namespace:?}: {why}"))?;
        for rule in &written.egress {
            rule.parse::<EgressRule>().map_err(|error| format!("Egress: {error}"))?;
        }
        check_script(&written)?;
        let artifacts = written.artifacts.iter().map(|(name, artifact)| {
            let artifact = match artifact {
                WrittenArtifact::Digest(digest) => {
                    InputArtifact { digest: Some(*digest), ..InputArtifact::default() }
                }
                WrittenArtifact::Ref(artifact) => InputArtifact::clone(artifact),
            };
            (name.clone(), artifact)
        });
        let script = written
            .script
            .clone()
            .map(|text| (SCRIPT.to_owned(), InputArtifact { raw: Some(text), ..InputArtifact::default() }));
        let inputs = Inputs {
            artifacts: artifacts.chain(script).collect(),
            parameters: written.parameters.clone(),
            targets: written.targets.clone(),
        };
        inputs.check()?;
        let single = written.completions.unwrap_or(1) == 1 && written.parallelism.unwrap_or(1) <= 1;
        let (spec, container) = (spec(&written), container(&written, &program));
        Ok(Self {
            namespace,
            program,
            inputs,
            single,
            spec,
            container,
            egress: written.egress.join(","),
            memoize: written.memoize,
        })
    }

    /// The memoization of the task and the value of its Jobs' label; `None` without memoization.
    pub(super) fn memo(&self, task: &str) -> Option<(&Memoize, String)> {
        let memoize = self.memoize.as_ref()?;
        let content = match &memoize.key {
            Some(key) => json!({"workflow": workflow(task), "key": key}),
            None => {
                json!({"container": self.container, "inputs": self.inputs, "completions": self.spec["completions"],
                "completionMode": self.spec["completionMode"]})
            }
        };
        Some((memoize, memo::label(&content)))
    }

    /// The Job's object. `task` is the idempotency key; `awaited`: the task waits for the Job's end.
    pub(super) fn manifest(&self, key: &ObjectKey, inputs: &str, task: &str, awaited: bool) -> Value {
        let mut pod = json!({"restartPolicy": "Never", "containers": [self.container]});
        match &self.program {
            Program::Component(_) => {
                pod["runtimeClassName"] = json!(wellknown::RUNTIME_CLASS_WASM);
                // There are no signals in a component, so waiting for it to end by itself is in vain.
                pod["terminationGracePeriodSeconds"] = json!(1);
            }
            Program::Image { runtime_class: Some(class), .. } => pod["runtimeClassName"] = json!(class),
            Program::Image { runtime_class: None, .. } => {}
        }
        let mut annotations = json!({ANNOTATION_INPUTS: inputs});
        if !self.egress.is_empty() {
            annotations[ANNOTATION_EGRESS] = json!(self.egress);
        }
        let mut spec = self.spec.clone();
        spec["template"] = json!({"metadata": {"annotations": annotations}, "spec": pod});
        let execution = task.rsplit_once('#').map_or(task, |(execution, _)| execution);
        let mut annotations = json!({ANNOTATION_KEY: task, ANNOTATION_EXECUTION: execution});
        if awaited {
            annotations[ANNOTATION_AWAITED] = json!("true");
        }
        let mut labels = json!({LABEL_WORKFLOW: workflow(task)});
        if let Some((_, label)) = self.memo(task) {
            labels[memo::LABEL_MEMO] = json!(label);
        }
        json!({
            "apiVersion": "batch/v1", "kind": "Job",
            "metadata": {
                "name": key.name, "namespace": key.namespace,
                "labels": labels, "annotations": annotations,
            },
            "spec": spec,
        })
    }
}

fn annotation<'a>(job: &'a Job, name: &str) -> Option<&'a str> {
    job.metadata.annotations.as_ref()?.get(name).map(String::as_str)
}

/// Whether a Job was made for this task.
pub(super) fn is_of(job: &Job, task: &str) -> bool {
    annotation(job, ANNOTATION_KEY) == Some(task)
}

/// The execution of the task that waits for this Job, or did.
pub(super) fn awaiting_execution(job: &Job) -> Option<&str> {
    annotation(job, ANNOTATION_EXECUTION).filter(|_| annotation(job, ANNOTATION_AWAITED) == Some("true"))
}

fn spec(written: &Written) -> Value {
    let lost = json!([{"type": "DisruptionTarget", "status": "True"}]);
    let mut spec = json!({
        // The workflow's own Retry is the place to try again, with its own waits.
        "backoffLimit": written.backoff_limit.unwrap_or(0),
        "ttlSecondsAfterFinished": written.ttl_seconds.unwrap_or(TTL_SECONDS_DEFAULT),
        "podFailurePolicy": {"rules": [{"action": "Ignore", "onPodConditions": lost}]},
    });
    let mut put = |field: &str, value: Option<Value>| {
        if let Some(value) = value {
            spec[field] = value;
        }
    };
    put("completions", written.completions.map(Value::from));
    put("parallelism", written.parallelism.map(Value::from));
    put("activeDeadlineSeconds", written.deadline_seconds.map(Value::from));
    put("completionMode", written.indexed.filter(|indexed| *indexed).map(|_| json!("Indexed")));
    spec
}

/// A script is run by an image, and is a file among the inputs.
fn check_script(written: &Written) -> Result<(), String> {
    if written.script.is_none() {
        return match written.interpreter.is_empty() {
            true => Ok(()),
            false => Err("Interpreter goes with Script".into()),
        };
    }
    if written.image.is_none() {
        return Err("Script needs an Image with an interpreter: a component is a program already".into());
    }
    if !written.command.is_empty() {
        return Err("one of Command and Script: a script is run by Interpreter".into());
    }
    match written.artifacts.contains_key(SCRIPT) || written.parameters.contains_key(SCRIPT) {
        true => Err(format!("the input {SCRIPT:?} is there already: it is the file of Script")),
        false => Ok(()),
    }
}

/// The container's command: of a script, the interpreter and the script's file.
fn command(written: &Written) -> Vec<String> {
    if written.script.is_none() {
        return written.command.clone();
    }
    let interpreter = match written.interpreter.is_empty() {
        true => vec![INTERPRETER_DEFAULT.to_owned()],
        false => written.interpreter.clone(),
    };
    interpreter.into_iter().chain([format!("{FOLDER_IN}/{SCRIPT}")]).collect()
}

fn container(written: &Written, program: &Program) -> Value {
    let text = mayfly_api::job_io::text_of;
    let image = match program {
        Program::Component(digest) => format!("{}{}", wellknown::COMPONENT_IMAGE_PREFIX, digest.hex()),
        Program::Image { image, .. } => image.clone(),
    };
    let env: Vec<_> =
        written.env.iter().map(|(name, value)| json!({"name": name, "value": text(value)})).collect();
    let mut limits = json!({});
    for (name, limit) in [("memory", &written.memory), ("cpu", &written.cpu)] {
        if let Some(limit) = limit {
            limits[name] = json!(limit);
        }
    }
    json!({"name": CONTAINER, "image": image, "command": command(written),
        "args": written.args.iter().map(text).collect::<Vec<_>>(), "env": env, "resources": {"limits": limits}})
}

/// The state machine's name within an idempotency key, as a label's value.
fn workflow(task: &str) -> String {
    let parts: Vec<&str> = task.split(':').collect();
    let name = parts.get(6).copied().unwrap_or("workflow");
    let good = |letter: char| if letter.is_ascii_alphanumeric() { letter.to_ascii_lowercase() } else { '-' };
    let name: String = name.chars().take(30).map(good).collect();
    match name.trim_matches('-') {
        "" => "workflow".into(),
        name => name.to_owned(),
    }
}

/// The same for every try of the same task: readable first, unique after.
pub(super) fn job_name(task: &str) -> String {
    format!("{}-{}", workflow(task), &Digest::of(task.as_bytes()).hex()[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    const TASK: &str = "arn:aws:states:us-east-1:000000000000:execution:My_Pipe:run-1#7";

    #[test]
    fn a_task_becomes_a_job() {
        let (component, data) = (Digest::of(b"c"), Digest::of(b"d"));
        let arguments = Arguments::parse(&json!({
            "Component": component, "Args": ["--n", 3], "Env": {"LEVEL": 2}, "Parameters": {"who": "Ada"},
            "Artifacts": {"data": data, "folder": {"digest": data, "directory": true, "bytes": 7}},
            "BackoffLimit": 2, "DeadlineSeconds": 9, "Memory": "32Mi", "Egress": ["https://example.com"],
        }))
        .unwrap();
        let key = ObjectKey::new("default", job_name(TASK));
        assert!(key.name.starts_with("my-pipe-") && key.name.len() == 24, "{}", key.name);
        let job = arguments.manifest(&key, "{}", TASK, true);
        let typed: Job = serde_json::from_value(job.clone()).unwrap();
        assert!(is_of(&typed, TASK) && !is_of(&typed, "another#7"));
        assert_eq!(awaiting_execution(&typed), TASK.strip_suffix("#7"));
        let begun: Job = serde_json::from_value(arguments.manifest(&key, "{}", TASK, false)).unwrap();
        assert_eq!(awaiting_execution(&begun), None, "nobody waits for it, so it may outlive its execution");
        let pod = &job["spec"]["template"];
        assert_eq!(pod["spec"]["runtimeClassName"], "wasm");
        let container = &pod["spec"]["containers"][0];
        assert_eq!(container["args"], json!(["--n", "3"]));
        assert_eq!(container["env"], json!([{"name": "LEVEL", "value": "2"}]));
        assert_eq!(container["resources"]["limits"], json!({"memory": "32Mi"}));
        assert_eq!(
            (&job["spec"]["backoffLimit"], &job["spec"]["activeDeadlineSeconds"]),
            (&json!(2), &json!(9))
        );
        assert_eq!(pod["metadata"]["annotations"][ANNOTATION_EGRESS], "https://example.com");
        assert!(arguments.inputs.artifacts["folder"].directory && arguments.single);
    }

    #[test]
    fn a_runtime_class_is_the_pods_and_needs_no_image() {
        let key = ObjectKey::new("default", "n");
        let pod = |arguments: Value| {
            let job = Arguments::parse(&arguments).unwrap().manifest(&key, "{}", TASK, true);
            job["spec"]["template"]["spec"].clone()
        };
        let batch = pod(json!({"RuntimeClass": "slurm", "Command": ["hostname"]}));
        assert_eq!(batch["runtimeClassName"], "slurm");
        assert_eq!(batch["containers"][0]["image"], "none");
        let image = pod(json!({"RuntimeClass": "other", "Image": "x"}));
        assert_eq!(
            (&image["runtimeClassName"], &image["containers"][0]["image"]),
            (&json!("other"), &json!("x"))
        );
        assert_eq!(pod(json!({"Image": "x"}))["runtimeClassName"], Value::Null);
    }

    #[test]
    fn a_script_is_a_file_that_its_interpreter_runs() {
        let command = |more: Value| {
            let mut arguments = json!({"Image": "tools:1", "Script": "print(1)\n", "Args": ["x"]});
            arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let arguments = Arguments::parse(&arguments).unwrap();
            assert_eq!(arguments.inputs.artifacts["script"].raw.as_deref(), Some("print(1)\n"));
            assert_eq!(arguments.container["args"], json!(["x"]));
            arguments.container["command"].clone()
        };
        assert_eq!(command(json!({})), json!(["sh", "/mayfly/in/script"]));
        let python = json!({"Interpreter": ["python3", "-u"]});
        assert_eq!(command(python), json!(["python3", "-u", "/mayfly/in/script"]));
    }

    #[test]
    fn what_decides_about_a_result_is_remembered() {
        let label = |task: &str, more: Value| {
            let mut arguments = json!({"Image": "tools:1", "Args": ["a"], "Memoize": {}});
            arguments.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            let arguments = Arguments::parse(&arguments).unwrap();
            let label = arguments.memo(task).map(|(_, label)| label);
            let job = arguments.manifest(&ObjectKey::new("default", "j"), "{}", task, true);
            assert_eq!(job["metadata"]["labels"]["mayfly.dev/memo"].as_str(), label.as_deref());
            label
        };
        let one = label(TASK, json!({}));
        assert_eq!(one, label("arn:aws:states:us-east-1:000000000000:execution:other:run-9#1", json!({})));
        assert_eq!(one, label(TASK, json!({"BackoffLimit": 2, "DeadlineSeconds": 9})));
        for other in [json!({"Args": ["b"]}), json!({"Image": "tools:2"}), json!({"Parameters": {"n": 1}})] {
            assert_ne!(one, label(TASK, other));
        }
        let key = json!({"Memoize": {"Key": {"day": 1}}});
        let by_key = label(TASK, key.clone());
        let mut changed = key.clone();
        changed["Args"] = json!(["b"]);
        assert_eq!(by_key, label(TASK, changed));
        assert_ne!(by_key, label("arn:aws:states:us-east-1:000000000000:execution:other:run-9#1", key));
        let never = json!({"Memoize": null});
        assert_eq!(label(TASK, never), None);
    }

    #[test]
    fn what_is_wrong_is_said() {
        let digest = Digest::of(b"c");
        for (arguments, why) in [
            (json!({}), "one of Component and Image"),
            (json!({"Component": digest, "Image": "x"}), "one of Component and Image"),
            (json!({"Component": digest, "RuntimeClass": "slurm"}), "RuntimeClass"),
            (json!({"Image": "x", "RuntimeClass": "No"}), "RuntimeClass"),
            (json!({"Component": "extract.wasm"}), "mayfly artifact push"),
            (json!({"Component": digest, "Paramters": {}}), "unknown field"),
            (json!({"Component": digest, "Parameters": {"a/b": 1}}), "is not an input's name"),
            (json!({"Component": digest, "Artifacts": {"a": "x"}}), "WrittenArtifact"),
            (json!({"Component": digest, "Namespace": "No"}), "Namespace"),
            (json!({"Component": digest, "Script": "x"}), "needs an Image"),
            (json!({"Image": "x", "Script": "x", "Command": ["sh"]}), "one of Command and Script"),
            (json!({"Image": "x", "Interpreter": ["sh"]}), "Interpreter goes with Script"),
            (json!({"Image": "x", "Script": "x", "Parameters": {"script": 1}}), "is there already"),
            (json!({"Component": digest, "Egress": ["ftp://x"]}), "Egress"),
        ] {
            let error = Arguments::parse(&arguments).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
    }
}
