//! A client of the workflows port: its address, and calls of the Step Functions API (awsJson1_0) and of the routes
//! beside it.

use std::{
    ffi::OsString,
    path::{Path, PathBuf},
};

use anyhow::Context as _;
use bytes::Bytes;
use http::{Method, Request, header};
use http_body_util::{BodyExt as _, Full, Limited};
use mayfly_api::workflow::names::{ACCOUNT, REGION};
use serde_json::{Value, json};

use crate::{
    Globals,
    data_dir::{DataDir, Endpoints, Origin},
    failure::{ErrorCode, Failure},
    find::parse_url,
    gateway::HttpClient,
};

/// The size limit of a response, in bytes: fits a page of 1000 events of 256 KiB each.
const ANSWER_BYTES_MAX: usize = 512 << 20;
/// The largest page size of the API.
const PAGE_ITEMS_MAX: usize = 1000;

pub(crate) struct Client {
    http: HttpClient,
    url: String,
    /// Where the URL was found.
    origin: String,
    /// The namespace for names without a dot.
    namespace: String,
}

/// An error of the API.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ApiRefusal {
    /// Such as `StateMachineDoesNotExist`.
    pub(super) name: String,
    pub(super) message: String,
}

impl From<ApiRefusal> for anyhow::Error {
    fn from(refused: ApiRefusal) -> Self {
        let ApiRefusal { name, message } = refused;
        let what = if message.is_empty() { name.clone() } else { format!("{message} ({name})") };
        let todo = match name.as_str() {
            "StateMachineDoesNotExist" => "see what there is: mayfly workflow list",
            "ExecutionDoesNotExist" => "see what there is: mayfly workflow list WORKFLOW",
            "ExecutionAlreadyExists" => "give another --name, or none",
            "StateMachineDeleting" => "it is removed when its executions have ended: try again then",
            "InvalidName" => "give another --name: letters, digits, - and _, 80 at most",
            _ => "",
        };
        Failure::new(ErrorCode::Foreign(name), what, todo).into()
    }
}

impl Client {
    /// The API given by the flags, the environment or the data directory. Sends no request yet.
    pub(crate) fn find(flag: Option<String>, namespace: String, globals: &Globals) -> anyhow::Result<Self> {
        let set = |name| std::env::var_os(name).filter(|value| !value.is_empty());
        let lookup = Lookup {
            flag,
            environment: set("MAYFLY_WORKFLOWS_URL").map(|url| url.to_string_lossy().into_owned()),
            server: globals.server.clone(),
            kubeconfig: globals.kubeconfig.clone(),
            kubeconfigs: set("KUBECONFIG"),
            data_dir: DataDir::resolve(globals.data_dir.clone()),
        };
        let (url, origin) = lookup.look()?;
        Ok(Self { http: HttpClient::new(), url, origin, namespace })
    }

    /// The namespace for names without a dot.
    pub(crate) fn namespace(&self) -> &str {
        &self.namespace
    }

    /// Calls an operation; errors include those of the API.
    pub(super) async fn call(&self, operation: &str, params: &Value) -> anyhow::Result<Value> {
        Ok(self.try_call(operation, params).await??)
    }

    /// Calls an operation; returns an error of the API as a value, for callers that handle it.
    pub(super) async fn try_call(
        &self,
        operation: &str,
        params: &Value,
    ) -> anyhow::Result<Result<Value, ApiRefusal>> {
        let credential =
            format!("AWS4-HMAC-SHA256 Credential={ACCOUNT}/20260101/{REGION}/states/aws4_request");
        let request = Request::post(format!("{}/", self.url.trim_end_matches('/')))
            .header("x-amz-target", format!("AWSStepFunctions.{operation}"))
            .header(header::CONTENT_TYPE, "application/x-amz-json-1.0")
            .header(header::AUTHORIZATION, credential)
            .body(Full::new(Bytes::from(params.to_string())))?;
        let sent = self.http.send(request).await;
        let response = sent.with_context(|| {
            format!("cannot reach the workflows API (the address is from {})", self.origin)
        })?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body =
            body.map_err(|error| anyhow::anyhow!("the response to {operation} ended early: {error}"))?;
        let body = body.to_bytes();
        let answer: Option<Value> = serde_json::from_slice(&body).ok();
        match answer {
            Some(answer) if status.is_success() => Ok(Ok(answer)),
            Some(answer) if answer["__type"].is_string() => Ok(Err(refusal(&answer))),
            _ => Err(Failure::error(
                ErrorCode::ServerError,
                format!("{} answered {status}, which is not a response of the Step Functions API", self.url),
                format!("the address is from {}; is it the workflows address?", self.origin),
            )),
        }
    }

    /// Calls a route of the port with plain JSON. The error contains the response's message.
    pub(crate) async fn rest(&self, method: Method, path: &str) -> anyhow::Result<Value> {
        let uri = format!("{}{path}", self.url.trim_end_matches('/'));
        let request = Request::builder().method(method).uri(uri).body(Full::default())?;
        let sent = self.http.send(request).await;
        let response =
            sent.with_context(|| format!("cannot call {path} (the address is from {})", self.origin))?;
        let status = response.status();
        let body = Limited::new(response.into_body(), ANSWER_BYTES_MAX).collect().await;
        let body = body.map_err(|error| anyhow::anyhow!("the response to {path} ended early: {error}"))?;
        let answer: Value = serde_json::from_slice(&body.to_bytes()).unwrap_or_default();
        match (status.is_success(), answer["error"]["message"].as_str()) {
            (true, _) => Ok(answer),
            (false, Some(message)) => {
                let code = match answer["error"]["code"].as_str() {
                    Some(code) => ErrorCode::Foreign(code.to_owned()),
                    None => ErrorCode::of_status(status.as_u16()),
                };
                Err(Failure::new(code, message.to_owned(), "").into())
            }
            (false, None) => Err(Failure::error(
                ErrorCode::ServerError,
                format!("{}{path} answered {status}", self.url),
                format!("the address is from {}; is it the workflows address?", self.origin),
            )),
        }
    }

    /// The items of all pages, at most `limit`, and whether there are more.
    pub(super) async fn list(
        &self,
        operation: &str,
        params: &Value,
        field: &str,
        limit: usize,
    ) -> anyhow::Result<(Vec<Value>, bool)> {
        self.list_where(operation, params, field, limit, |_| true).await
    }

    /// [`Client::list`] with a filter.
    pub(super) async fn list_where(
        &self,
        operation: &str,
        params: &Value,
        field: &str,
        limit: usize,
        keep: impl Fn(&Value) -> bool,
    ) -> anyhow::Result<(Vec<Value>, bool)> {
        let mut params = params.clone();
        let mut items = Vec::new();
        loop {
            params["maxResults"] = (limit - items.len()).clamp(1, PAGE_ITEMS_MAX).into();
            let mut answer = self.call(operation, &params).await?;
            if let Value::Array(page) = answer[field].take() {
                items.extend(page.into_iter().filter(&keep));
            }
            let token = answer["nextToken"].take();
            let is_more = token.is_string() || items.len() > limit;
            if !token.is_string() || items.len() >= limit {
                items.truncate(limit);
                return Ok((items, is_more));
            }
            params["nextToken"] = token;
        }
    }

    /// The API's description of a workflow; `None` if it does not exist.
    pub(super) async fn workflow(&self, arn: &str) -> anyhow::Result<Option<Value>> {
        match self.try_call("DescribeStateMachine", &json!({"stateMachineArn": arn})).await? {
            Ok(workflow) => Ok(Some(workflow)),
            Err(refused) if refused.name == "StateMachineDoesNotExist" => Ok(None),
            Err(refused) => Err(refused.into()),
        }
    }
}

fn refusal(answer: &Value) -> ApiRefusal {
    let text = |field: &str| answer[field].as_str().unwrap_or("");
    let name = text("__type").rsplit('#').next().unwrap_or("");
    let message = if answer["message"].is_string() { text("message") } else { text("Message") };
    ApiRefusal { name: name.to_owned(), message: message.to_owned() }
}

/// The places that can define the API's address, in order of precedence.
struct Lookup {
    flag: Option<String>,
    /// The value of `MAYFLY_WORKFLOWS_URL`.
    environment: Option<String>,
    server: Option<String>,
    kubeconfig: Option<PathBuf>,
    /// The value of `KUBECONFIG`.
    kubeconfigs: Option<OsString>,
    data_dir: DataDir,
}

impl Lookup {
    /// The address and where it was found; the error lists the checked places.
    fn look(self) -> anyhow::Result<(String, String)> {
        let named = [("--workflows-url", self.flag), ("MAYFLY_WORKFLOWS_URL", self.environment)];
        let mut looked = Vec::new();
        for (name, url) in named {
            match url {
                Some(url) => {
                    parse_url(name, &url, "http://127.0.0.1:8083")?;
                    return Ok((url, name.to_owned()));
                }
                None if name.starts_with('-') => looked.push(format!("{name}: not given")),
                None => looked.push(format!("{name}: not set")),
            }
        }
        // The files of this data directory do not belong to a server given by a flag.
        let files = if self.server.is_some() {
            looked.push("--server: names the Kubernetes API only".to_owned());
            Vec::new()
        } else if let Some(kubeconfig) = self.kubeconfig {
            vec![kubeconfig.with_file_name("endpoints.json")]
        } else {
            let mut files = vec![self.data_dir.endpoints()];
            if self.data_dir.origin() != Origin::Flag {
                let listed = self.kubeconfigs.iter().flat_map(std::env::split_paths);
                let beside = listed.map(|kubeconfig| kubeconfig.with_file_name("endpoints.json"));
                files.splice(0..0, beside);
            }
            files
        };
        for file in files {
            match endpoint(&file) {
                Ok(url) => return Ok((url, file.display().to_string())),
                Err(why) => looked.push(format!("{}: {why}", file.display())),
            }
        }
        let todo = format!("looked at:\n  {}\nstart one with: mayfly up", looked.join("\n  "));
        Err(Failure::new(ErrorCode::NoServer, "no server with workflows was found", todo).into())
    }
}

fn endpoint(file: &Path) -> Result<String, String> {
    match Endpoints::read(file) {
        Ok(Endpoints { workflows: Some(url), .. }) => Ok(url),
        Ok(_) => Err("its server has no workflows".into()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Err("no such file".into()),
        Err(error) => Err(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lookup(data_dir: &Path) -> Lookup {
        Lookup {
            flag: None,
            environment: None,
            server: None,
            kubeconfig: None,
            kubeconfigs: None,
            data_dir: DataDir::resolve(Some(data_dir.to_owned())),
        }
    }

    #[test]
    fn flag_then_environment_then_files() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        for (name, workflows) in
            [("data", ",\"workflows\":\"http://data\""), ("other", ",\"workflows\":\"http://other\"")]
        {
            std::fs::create_dir(path.join(name)).unwrap();
            let endpoints = format!("{{\"api\":\"https://a\",\"http\":\"http://h\"{workflows}}}");
            std::fs::write(path.join(name).join("endpoints.json"), endpoints).unwrap();
        }
        let data = path.join("data");
        let url = |lookup: Lookup| lookup.look().unwrap().0;
        assert_eq!(url(lookup(&data)), "http://data");
        let environment = Some("http://environment".to_owned());
        assert_eq!(url(Lookup { environment: environment.clone(), ..lookup(&data) }), "http://environment");
        assert_eq!(url(Lookup { environment, flag: Some("http://f".into()), ..lookup(&data) }), "http://f");
        let kubeconfig = path.join("other/kubeconfig");
        assert_eq!(url(Lookup { kubeconfig: Some(kubeconfig.clone()), ..lookup(&data) }), "http://other");
        // `--data-dir` has precedence over KUBECONFIG, and KUBECONFIG over the default directory.
        let kubeconfigs = Some(kubeconfig.into_os_string());
        assert_eq!(url(Lookup { kubeconfigs: kubeconfigs.clone(), ..lookup(&data) }), "http://data");
        let unflagged = lookup(&data).data_dir.with_origin(Origin::Home);
        assert_eq!(url(Lookup { kubeconfigs, data_dir: unflagged, ..lookup(&data) }), "http://other");
    }

    #[test]
    fn every_place_is_listed() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("endpoints.json");
        let error = lookup(folder.path()).look().unwrap_err().to_string();
        for part in
            ["--workflows-url: not given", "MAYFLY_WORKFLOWS_URL: not set", "no such file", "mayfly up"]
        {
            assert!(error.contains(part), "{part:?} is not in {error}");
        }
        std::fs::write(&file, "{\"api\":\"https://a\",\"http\":\"http://h\"}").unwrap();
        assert!(lookup(folder.path()).look().unwrap_err().to_string().contains("has no workflows"));
        let server = Lookup { server: Some("https://far".into()), ..lookup(folder.path()) };
        let error = server.look().unwrap_err().to_string();
        assert!(error.contains("--server: names") && !error.contains("endpoints.json"), "{error}");
        let flag = Some("127.0.0.1:8083".to_owned());
        assert!(
            Lookup { flag, ..lookup(folder.path()) }.look().unwrap_err().to_string().contains("not a URL")
        );
    }

    #[test]
    fn refusals_are_named() {
        for (answer, name, message) in [
            (json!({"__type": "com.amazonaws.swf.service.v2.model#X", "message": "m"}), "X", "m"),
            (json!({"__type": "Y", "Message": "m"}), "Y", "m"),
            (json!({"__type": "a#Z"}), "Z", ""),
        ] {
            assert_eq!(refusal(&answer), ApiRefusal { name: name.into(), message: message.into() });
        }
    }
}
