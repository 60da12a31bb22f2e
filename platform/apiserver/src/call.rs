//! Requests for resources: selects the verb from target, query and body, and converts its result to a response.

mod node_reads;
mod parts;

use std::{borrow::Cow, sync::Arc};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use http::{HeaderValue, Method, StatusCode, header, request::Parts};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use mayfly_api::validation::FieldError;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;

use crate::{
    access::User,
    decode::{Decoded, decode, numbers},
    logs, meta,
    negotiate::{self, BodyForm, Representation},
    object::Object,
    registry::{Backing, Kind, Subresource},
    render::{IncludeObject, ObjectView, json_response, json_value},
    request::{Query, RequestTarget},
    server::ServerState,
    status::ApiError,
    streams::{PodStream, hold_until_closed},
    verbs::{self, DeleteOptions, Manager, ObjectState, Part, Patch, PatchForm, WriteOutcome, WriteRequest},
};

const APPLY_CONTENT_TYPE: &str = "application/apply-patch+yaml";
/// The page size that `kubectl get` requests, and the one that it gets for tables.
const KUBECTL_PAGE: usize = 500;
const TABLE_PAGE: usize = 10_000;

/// A parsed request for a resource.
pub(crate) struct ResourceRequest {
    pub(crate) server: Arc<ServerState>,
    pub(crate) user: User,
    pub(crate) target: RequestTarget,
    pub(crate) query: Query,
    pub(crate) parts: Parts,
}

impl ResourceRequest {
    /// Answers the request. A body that an error leaves unread is discarded by the caller.
    pub(crate) async fn answer(mut self, body: &mut Body) -> Result<Response, ApiError> {
        self.hide_bootstrap_tokens();
        if self.target.is_watch {
            return self.watch_by_path().await;
        }
        if self.parts.method == Method::GET {
            if self.query.watch && self.target.name.is_none() {
                if !self.target.kind.allows("watch") {
                    return Err(ApiError::method_not_allowed());
                }
                return self.watch().await;
            }
            if self.target.subresource.as_deref() == Some("log") {
                return self.log().await;
            }
        }
        let plural = self.target.kind.plural;
        if let Some(stream) = PodStream::of(plural, self.target.subresource.as_deref()) {
            return Box::pin(self.stream(stream)).await;
        }
        let server = Arc::clone(&self.server);
        let limit = server.config.request_timeout;
        let work = async {
            let _permit = server.acquire_permit(&self.user).await?;
            self.short(body).await
        };
        match tokio::time::timeout(limit, Box::pin(work)).await {
            Ok(answer) => answer,
            Err(_) => {
                let message = format!("the request did not finish within {} s", limit.as_secs());
                Err(ApiError::timeout(message))
            }
        }
    }

    /// A permit for a long-lived request (a watch, a followed log, a stream into a pod). Components of this process
    /// need none: watches of clients cannot keep a controller from its own.
    pub(crate) fn long_lived(&self) -> Result<Option<OwnedSemaphorePermit>, ApiError> {
        if self.server.shutdown.is_cancelled() {
            return Err(ApiError::unavailable("the server is shutting down"));
        }
        if self.user.is_in_process() {
            return Ok(None);
        }
        Arc::clone(&self.server.watches).try_acquire_owned().map(Some).map_err(|_| {
            let most = self.server.config.watches_max;
            ApiError::too_many_requests(format!(
                "too many watches, followed logs and streams into pods: the limit is {most}"
            ))
        })
    }

    async fn log(self) -> Result<Response, ApiError> {
        let kind = self.target.kind;
        let (true, Some(name)) = (kind.has(Subresource::Log), &self.target.name) else {
            return Err(ApiError::no_resource());
        };
        let query = self.parts.uri.query().unwrap_or("");
        let permit = self.long_lived()?;
        let namespace = &self.target.namespace;
        let response = match logs::is_function(kind) {
            true => self.server.function_log(kind, namespace, name, query).await?,
            false => self.server.pod_log(kind, namespace, name, &self.parts).await?,
        };
        if response.status() == StatusCode::SWITCHING_PROTOCOLS {
            hold_until_closed(self.parts.extensions.get(), permit);
            return Ok(response);
        }
        // The slot is released when the response has ended or its client has disconnected.
        Ok(self.ends_with_server(response, permit))
    }

    /// Ends the body of a long response when the server stops. `held` is dropped with the body.
    pub(crate) fn ends_with_server(&self, response: Response, held: impl Send + 'static) -> Response {
        let stop = self.server.shutdown.clone();
        response.map(|body| {
            use futures::StreamExt;
            let stream = body.into_data_stream().take_until(stop.cancelled_owned());
            Body::from_stream(stream.map(move |chunk| {
                let _ = &held;
                chunk
            }))
        })
    }

    /// Answers `/api/v1/watch/…`, with a name in the path or without (upstream's deprecated form).
    async fn watch_by_path(mut self) -> Result<Response, ApiError> {
        if self.parts.method != Method::GET || !self.target.kind.allows("watch") {
            return Err(ApiError::method_not_allowed());
        }
        self.query.watch = true;
        if let Some(name) = self.target.name.take() {
            let others = self.query.field_selector.take().map(|others| format!(",{others}"));
            self.query.field_selector = Some(format!("metadata.name={name}{}", others.unwrap_or_default()));
        }
        self.watch().await
    }

    async fn watch(self) -> Result<Response, ApiError> {
        let permit = self.long_lived()?;
        let representation = negotiate::stream_representation(&self.parts.headers)?;
        let view = ObjectView { representation, ..self.view()? };
        let lines = self.server.watch(&self.target.namespace, &self.query, view, permit).await?;
        Ok(watched(Body::from_stream(lines)))
    }

    /// Answers a request for a kind whose objects another component stores ([`crate::KindView`]).
    async fn viewed(&self) -> Result<Response, ApiError> {
        let view = self.view()?;
        let namespace = &self.target.namespace;
        match (self.parts.method.as_str(), &self.target.name, &self.target.subresource) {
            (_, _, Some(_)) => Err(ApiError::no_resource()),
            ("GET", None, None) => {
                let query = self.list_query(&view);
                let (meta, entries) = self.server.list_view(view, namespace, &query).await?;
                Ok(json_response(StatusCode::OK, view.list(&meta, entries.iter())?))
            }
            ("GET", Some(name), None) => {
                let entry = self.server.get_view(view.kind, namespace, name).await?;
                let mut out = Vec::with_capacity(entry.value.len() + 64);
                view.append_stored(&mut out, &entry.value, entry.modified)?;
                Ok(json_response(StatusCode::OK, out))
            }
            (_, name, None) => {
                let name = name.as_deref().unwrap_or("NAME");
                let mut error = ApiError::method_not_allowed();
                error.message = self.server.read_only(view.kind, name)?;
                Err(error)
            }
        }
    }

    fn view(&self) -> Result<ObjectView, ApiError> {
        Ok(ObjectView {
            kind: self.target.kind,
            representation: negotiate::representation(&self.parts.headers)?,
            include: IncludeObject::parse(self.query.include_object.as_deref())?,
            now: self.server.now(),
        })
    }

    async fn short(&self, body: &mut Body) -> Result<Response, ApiError> {
        let kind = self.target.kind;
        if kind.backing == Backing::Review {
            return match (self.parts.method.as_str(), &self.target.name) {
                ("POST", None) => self.review(body).await,
                _ => Err(ApiError::method_not_allowed()),
            };
        }
        if self.parts.method != Method::GET {
            // The form of the response is checked before anything is written.
            self.view()?;
        }
        if let (Some(name), Some(subresource)) = (&self.target.name, &self.target.subresource)
            && let Some(row) = kind.subresources.iter().find(|row| row.describe().0 == subresource)
            && !matches!(
                row,
                Subresource::Finalize | Subresource::Approval | Subresource::EphemeralContainers
            )
        {
            return self.subresource(*row, name, body).await;
        }
        if kind.backing == Backing::View {
            return self.viewed().await;
        }
        if kind.backing == Backing::Measured {
            return self.measured(self.view()?).await;
        }
        if kind.backing == Backing::Computed {
            return self.computed(self.view()?);
        }
        let Some(part) = self.part() else {
            return Err(ApiError::no_resource());
        };
        match (self.parts.method.as_str(), &self.target.name) {
            ("GET", None) => self.list(),
            ("GET", Some(name)) => self.get(name),
            ("POST", None) => self.create(body).await,
            ("PUT", Some(name)) => self.update(name, part, body).await,
            ("PATCH", Some(name)) if part != Part::Finalize => self.patch(name, part, body).await,
            ("DELETE", Some(name)) if part == Part::Main => self.delete(name, body).await,
            // No deletecollection across all namespaces, as upstream.
            ("DELETE", None)
                if kind.namespaced && self.target.namespace.is_empty()
                    || !kind.allows("deletecollection") =>
            {
                Err(ApiError::method_not_allowed())
            }
            ("DELETE", None) => self.delete_collection(body).await,
            _ => Err(ApiError::method_not_allowed()),
        }
    }

    fn part(&self) -> Option<Part> {
        match self.target.subresource.as_deref() {
            None => Some(Part::Main),
            Some("status") if self.target.kind.status => Some(Part::Status),
            Some("approval") if self.target.kind.has(Subresource::Approval) => Some(Part::Status),
            Some("ephemeralcontainers") if self.target.kind.has(Subresource::EphemeralContainers) => {
                Some(Part::EphemeralContainers)
            }
            Some("finalize") if self.target.kind.has(Subresource::Finalize) => Some(Part::Finalize),
            Some(_) => None,
        }
    }

    async fn review(&self, body: &mut Body) -> Result<Response, ApiError> {
        let (object, _) = self.validated_object(self.object_body(body).await?, None)?;
        if self.target.kind.kind == "Binding" {
            return self.bind_named(object).await;
        }
        let namespace = &self.target.namespace;
        let answer = self.server.answer_review(self.target.kind, object, &self.user, namespace)?;
        Ok(json_value(StatusCode::CREATED, &Value::Object(answer.0)))
    }

    fn list(&self) -> Result<Response, ApiError> {
        let view = self.view()?;
        let query = self.list_query(&view);
        let (meta, entries) = self.server.list(view.kind, &self.target.namespace, &query)?;
        let body = view.list(&meta, entries.iter().map(|entry| &**entry))?;
        Ok(json_response(StatusCode::OK, body))
    }

    /// The query of a list. `kubectl get` asks for tables in pages of 500 and sends five requests a second, so that
    /// 100,000 objects would take 40 s; it gets larger pages, unless the rows hold whole objects. (A server may give
    /// more than a limit: upstream's does for `resourceVersion=0`.)
    fn list_query(&self, view: &ObjectView) -> Cow<'_, Query> {
        let is_small = view.representation == Representation::Table && view.include != IncludeObject::Object;
        if is_small && self.query.limit == Some(KUBECTL_PAGE) {
            return Cow::Owned(Query { limit: Some(TABLE_PAGE), ..self.query.clone() });
        }
        Cow::Borrowed(&self.query)
    }

    fn get(&self, name: &str) -> Result<Response, ApiError> {
        let view = self.view()?;
        let entry = self.server.get(view.kind, &self.target.namespace, name, &self.query)?;
        self.check_read(&entry.value, name)?;
        let mut out = Vec::new();
        view.append_stored(&mut out, &entry.value, entry.modified)?;
        Ok(json_response(StatusCode::OK, out))
    }

    async fn create(&self, body: &mut Body) -> Result<Response, ApiError> {
        let decoded = self.object_body(body).await?;
        let (object, warnings) = self.validated_object(decoded, None)?;
        let outcome = self.server.create(&self.write_request(), object, warnings).await?;
        self.answer_written(outcome)
    }

    async fn update(&self, name: &str, part: Part, body: &mut Body) -> Result<Response, ApiError> {
        let decoded = self.object_body(body).await?;
        let (object, warnings) = self.validated_object(decoded, Some(name))?;
        let outcome = self.server.update(&self.write_request(), part, object, warnings).await?;
        self.answer_written(outcome)
    }

    async fn patch(&self, name: &str, part: Part, body: &mut Body) -> Result<Response, ApiError> {
        let content_type = negotiate::content_type(&self.parts.headers);
        if content_type == APPLY_CONTENT_TYPE {
            let decoded = decode_applied(&self.bytes(body).await?)?;
            let outcome =
                self.server.apply(&self.write_request(), name, part, decoded, self.query.force).await?;
            return self.answer_written(outcome);
        }
        if self.query.force {
            let error = FieldError::forbidden("force", "may not be specified for non-apply patch");
            return Err(ApiError::invalid_options("PatchOptions", &[error]));
        }
        let Some(form) = PatchForm::from_content_type(&content_type) else {
            return Err(ApiError::unsupported_media_type(&[
                "application/json-patch+json",
                "application/merge-patch+json",
                "application/strategic-merge-patch+json",
                APPLY_CONTENT_TYPE,
            ]));
        };
        let bytes = self.bytes(body).await?;
        let decoded = decode(BodyForm::Json, &bytes).map_err(|error| self.unless_absent(name, error))?;
        let patch = Patch::parse(form, self.target.kind, &decoded.value);
        let patch = patch.map_err(|error| self.unless_absent(name, error))?;
        let outcome = self.server.patch(&self.write_request(), name, part, patch, &decoded).await?;
        self.answer_written(outcome)
    }

    /// The error of a patch that cannot be read; if the object does not exist, that comes first, as upstream.
    fn unless_absent(&self, name: &str, error: ApiError) -> ApiError {
        let kind = self.target.kind;
        match self.server.store.get(&verbs::key(kind, &self.target.namespace, name)) {
            Some(_) => error,
            None => ApiError::not_found(kind, name),
        }
    }

    async fn delete(&self, name: &str, body: &mut Body) -> Result<Response, ApiError> {
        let options = self.delete_options(body).await?;
        let mut request = self.write_request();
        request.dry_run = options.dry_run;
        let outcome = self.server.delete(&request, name, &options).await?;
        let ObjectState::Deleted(object) = &outcome.state else { return self.answer_written(outcome) };
        let kind = self.target.kind;
        if kind.grace.is_some() || verbs::returns_deleted(kind) {
            return self.answer_written(outcome);
        }
        let mut details = json!({"name": name, "kind": kind.plural, "uid": object.uid()});
        if !kind.group.is_empty() {
            details["group"] = kind.group.into();
        }
        let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details});
        Ok(json_value(StatusCode::OK, &status))
    }

    async fn delete_collection(&self, body: &mut Body) -> Result<Response, ApiError> {
        let options = self.delete_options(body).await?;
        let mut request = self.write_request();
        request.dry_run = options.dry_run;
        let (meta, entries, warnings) =
            self.server.delete_collection(&request, &self.query, &options).await?;
        let body = self.view()?.list(&meta, entries.iter().map(|entry| &**entry))?;
        Ok(with_warnings(json_response(StatusCode::OK, body), warnings))
    }

    async fn delete_options(&self, body: &mut Body) -> Result<DeleteOptions, ApiError> {
        let bytes = self.bytes(body).await?;
        if bytes.is_empty() {
            return DeleteOptions::parse(&Value::Null, &self.query);
        }
        let decoded = decode(negotiate::body_form(&self.parts.headers)?, &bytes)?;
        DeleteOptions::parse(&decoded.value, &self.query)
    }

    pub(crate) fn write_request(&self) -> WriteRequest {
        WriteRequest {
            kind: self.target.kind,
            namespace: self.target.namespace.clone(),
            now: self.server.now(),
            dry_run: self.query.dry_run,
            validation: self.query.field_validation,
            manager: Manager::of(&self.query, &self.parts.headers, &self.user),
            user: self.user.clone(),
        }
    }

    async fn bytes(&self, body: &mut Body) -> Result<Bytes, ApiError> {
        let limit = self.server.config.body_bytes_max;
        match Limited::new(body, limit).collect().await {
            Ok(collected) => Ok(collected.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(ApiError::too_large(limit)),
            Err(error) => Err(ApiError::bad_request(format!("cannot read the body: {error}"))),
        }
    }

    async fn object_body(&self, body: &mut Body) -> Result<Decoded, ApiError> {
        let form = negotiate::body_form(&self.parts.headers)?;
        decode(form, &self.bytes(body).await?)
    }

    /// Converts a body to an object of the target's kind, and checks its type and schema.
    fn validated_object(
        &self,
        decoded: Decoded,
        name: Option<&str>,
    ) -> Result<(Object, Vec<String>), ApiError> {
        let kind: &Kind = self.target.kind;
        let map = match decoded.value {
            Value::Object(map) => map,
            // Go decodes it as an empty object.
            Value::Null => serde_json::Map::new(),
            _ => return Err(ApiError::bad_request("the body is not a JSON object")),
        };
        let mut object = Object(map);
        verbs::set_type(kind, &mut object)?;
        numbers::restore(kind, &mut object.0, &decoded.numbers);
        let strict = |why: String| {
            let (kind, version) = (kind.kind, kind.version);
            ApiError::bad_request(format!(
                "{kind} in version {version:?} cannot be handled as a {kind}: {why}"
            ))
        };
        let warnings = verbs::validate_schema(
            kind,
            &mut object,
            decoded.duplicates,
            self.query.field_validation,
            strict,
        )?;
        let namespace = &self.target.namespace;
        if kind.namespaced && namespace.is_empty() {
            return Err(ApiError::method_not_allowed());
        }
        meta::set_name_and_namespace(&mut object, kind, namespace, name)?;
        Ok((object, warnings))
    }

    fn answer_written(&self, outcome: WriteOutcome) -> Result<Response, ApiError> {
        let view = self.view()?;
        let mut out = Vec::new();
        match outcome.state {
            ObjectState::Stored(entry) => view.append_stored(&mut out, &entry.value, entry.modified)?,
            ObjectState::Dry(object) | ObjectState::Deleted(object) => {
                view.append_decoded(&mut out, object, true)
            }
        }
        let code = if outcome.created { StatusCode::CREATED } else { StatusCode::OK };
        Ok(with_warnings(json_response(code, out), outcome.warnings))
    }
}

/// Adds a header for each warning (upstream's `NewWarningHeader`).
pub(crate) fn with_warnings(mut response: Response, warnings: Vec<String>) -> Response {
    for warning in warnings {
        let text = format!("299 - \"{}\"", warning.replace('\\', "\\\\").replace('"', "\\\""));
        if let Ok(value) = HeaderValue::from_bytes(text.as_bytes()) {
            response.headers_mut().append(header::WARNING, value);
        }
    }
    response
}

/// The response of a watch: JSON in every representation of the objects.
fn watched(lines: Body) -> Response {
    let mut response = Response::new(lines);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Decodes the body of an apply request, which is YAML. A JSON body is decoded by the JSON decoder, which is faster
/// and accepts all of JSON.
fn decode_applied(bytes: &[u8]) -> Result<Decoded, ApiError> {
    let is_json = bytes.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
    decode(if is_json { BodyForm::Json } else { BodyForm::Yaml }, bytes)
}
