use mayfly_apiserver::{ApiServer, ApiServerDeps, Config, User};
use mayfly_informer::Informers;
use mayfly_workflows_engine::engine::CallOrigin;
use mayfly_workflows_language::arn::{ExecutionArn, StateMachineArn};

use super::*;

/// A cluster's API in this process, and what carries out `job:run` in it.
struct JobsTestServer {
    jobs: Jobs,
    client: Client,
    stop: CancellationToken,
    _api: ApiServer,
    _folder: tempfile::TempDir,
}

impl JobsTestServer {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let artifacts = Artifacts::open(folder.path()).unwrap();
        let deps = ApiServerDeps {
            store: mayfly_store::Store::in_memory(),
            artifacts: artifacts.clone(),
            clock: Arc::new(jiff::Timestamp::now),
            nodes: Arc::new(|_, _| Box::pin(async { Err("no node".into()) })),
            inspector: Arc::new(|_| Ok(Value::Null)),
        };
        let api = ApiServer::create(Config::new("token"), deps, &mut Default::default()).await.unwrap();
        let client = api.client(User::in_process("test"));
        let stop = CancellationToken::new();
        let informers = Informers::create(client.clone(), stop.clone());
        let jobs = Jobs::new(JobsDeps {
            client: client.clone(),
            jobs: informers.of(),
            artifacts,
            answers_http: |_| Ok(false),
        });
        Self { jobs, client, stop, _api: api, _folder: folder }
    }
}

impl Drop for JobsTestServer {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test]
async fn a_job_that_is_somebody_elses_is_neither_answered_from_nor_deleted() {
    let cluster = JobsTestServer::start().await;
    let task = "arn:aws:states:us-east-1:000000000000:execution:pipe:run-1#7";
    let key = ObjectKey::new("default", arguments::job_name(task));
    let api: Api<Job> = Api::namespaced(cluster.client.clone(), &key.namespace);
    let pod = json!({"restartPolicy": "Never", "containers": [{"name": "c", "image": "x"}]});
    let theirs = json!({"metadata": {"name": key.name}, "spec": {"template": {"spec": pod}}});
    let theirs: Job = serde_json::from_value(theirs).unwrap();
    api.create(&PostParams::default(), &theirs).await.unwrap();
    let call = IntegrationCall {
        resource: RUN_SYNC.into(),
        arguments: json!({"Component": Digest::of(b"c")}),
        task_token: String::new(),
        idempotency_key: task.into(),
        origin: CallOrigin {
            state_machine: StateMachineArn::from_trusted(
                "arn:aws:states:us-east-1:000000000000:stateMachine:m",
            ),
            execution: ExecutionArn::from_trusted("arn:aws:states:us-east-1:000000000000:execution:m:e"),
        },
        submitted: None,
        retries: 0,
    };
    let told = tokio::time::timeout(std::time::Duration::from_secs(10), cluster.jobs.run(call)).await;
    assert_eq!(told.expect("it is not waited for").unwrap_err().error_type, "Job.AlreadyExists");
    assert!(api.get_opt(&key.name).await.unwrap().is_some());
}
