//! Task states.

use std::sync::Arc;

use crate::definition::{IntegrationPattern, Quantity, Resource, SECONDS_MAX, TaskState, unsupported};
use crate::template::Template;
use crate::value::Value;

use super::allowed;
use super::fields::Fields;
use super::flow::Compiler;

impl Compiler {
    pub(super) fn task(&mut self, fields: &Fields<'_>) -> Option<TaskState> {
        fields.required("Resource", &mut self.report)?;
        let (arn, resource) = match fields.get("Resource") {
            Some(value) if is_deployment_function(value) => {
                let text: Arc<str> = value.to_text().into();
                (text.clone(), Ok(Resource::Foreign(text)))
            }
            _ => {
                let arn = fields.string("Resource", &mut self.report)?;
                let resource = Resource::parse(&arn);
                (arn, resource)
            }
        };
        if resource.is_err() {
            let message = unknown_resource(&arn);
            self.report.schema(&fields.place("Resource"), message);
        }
        let timeout = fields.quantity("TimeoutSeconds", 1, SECONDS_MAX, &mut self.report);
        let heartbeat = fields.quantity("HeartbeatSeconds", 1, SECONDS_MAX, &mut self.report);
        if let (Some(Quantity::Value(timeout)), Some(Quantity::Value(heartbeat))) = (&timeout, &heartbeat)
            && heartbeat >= timeout
        {
            let message = "The field 'HeartbeatSeconds' should be smaller than the field 'TimeoutSeconds'";
            self.report.schema(&fields.place("HeartbeatSeconds"), message);
        }
        let credentials = self.credentials(fields, resource.as_ref().ok());
        let resource = resource.ok()?;
        self.express_can(&resource, fields);
        self.arguments(&resource, &arn, fields);
        Some(TaskState { resource, arn, timeout, heartbeat, credentials })
    }

    /// Checks the pattern in an Express machine, which supports only request-response.
    fn express_can(&mut self, resource: &Resource, fields: &Fields<'_>) {
        if !self.express {
            return;
        }
        let at = fields.place("Resource");
        if matches!(resource, Resource::Activity(_)) {
            self.report.schema(&at, "Express state machine does not support Activity ARN");
            return;
        }
        match resource.pattern() {
            IntegrationPattern::RequestResponse => {}
            // The trailing space is part of AWS's message.
            waiting => self.report.schema(
                &at,
                format!("Express state machine does not support '.{waiting}' service integration "),
            ),
        }
    }

    /// `{"RoleArn": …}`. The States Language does not specify the credentials of tasks that AWS does not integrate.
    fn credentials(&mut self, fields: &Fields<'_>, resource: Option<&Resource>) -> Option<Template> {
        let at = &fields.place("Credentials");
        let foreign = matches!(resource, Some(Resource::Foreign(_)));
        let activity = matches!(resource, Some(Resource::Activity(_)));
        let credentials = fields.object("Credentials", &mut self.report)?;
        if activity {
            self.report.schema(at, "The field 'Credentials' is not supported for activities");
        } else if !foreign {
            credentials.only(allowed::CREDENTIALS, &mut self.report);
            if !credentials.has("RoleArn") && !credentials.has("RoleArn.$") {
                self.report.schema(at, "The field 'RoleArn' is required but was missing");
            }
        }
        fields.template("Credentials", &mut self.report)
    }

    /// Checks the required arguments of an integration. Arguments that are one JSONata expression are only known at run
    /// time.
    fn arguments(&mut self, resource: &Resource, arn: &str, fields: &Fields<'_>) {
        let shape = resource.parameters();
        let needed: &[&str] = match (resource, shape) {
            (_, Some(shape)) => shape.required,
            (Resource::HttpInvoke, _) => &["ApiEndpoint", "Method"],
            _ => return,
        };
        let name = if fields.jsonata() { "Arguments" } else { "Parameters" };
        let given = match fields.get(name) {
            None => {
                let message = format!("{name} field is required for resource ARN: {arn}");
                self.report.schema(&fields.at, message);
                return;
            }
            Some(Value::Object(map)) => map,
            Some(_) => return,
        };
        for field in needed {
            if !given.contains_key(field) && !given.contains_key(&format!("{field}.$")) {
                let message = format!("The field '{field}' is required but was missing");
                self.report.schema(&fields.place(name), message);
            }
        }
        // The value of a field whose name ends with `.$` is only known at run time.
        let written = |field: &&Arc<str>| fields.jsonata() || !field.ends_with(".$");
        let unknown = shape.filter(|_| !self.accepted).into_iter();
        let unknown =
            unknown.flat_map(|shape| given.keys().filter(written).filter(move |key| !shape.has(key)));
        for field in unknown {
            self.report.schema(&fields.place(name), unsupported(field));
        }
    }
}

/// `{"Ref": …}` or `{"Fn::GetAtt": …}`: CloudFormation replaces it before it creates the machine, like `${Name}`.
fn is_deployment_function(value: &Value) -> bool {
    let Some(map) = value.as_object() else { return false };
    map.len() == 1 && map.keys().all(|key| &**key == "Ref" || key.starts_with("Fn::"))
}

/// AWS's message about an unknown `Resource`.
pub(super) fn unknown_resource(arn: &str) -> String {
    if !arn.starts_with("arn:") {
        return "Value is not a valid resource ARN".to_string();
    }
    format!(
        "The resource provided {arn} is not recognized. The value is not a valid resource ARN, or the resource is \
         not available in this region."
    )
}
