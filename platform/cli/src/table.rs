//! Tables of the server (`meta.k8s.io/v1 Table`), and the layout of all tables on a terminal.

use comfy_table::{ColumnConstraint, ContentArrangement, Table, Width, presets};
use serde::Deserialize;
use serde_json::Value;

/// Requests the Table representation; servers without it return a plain object.
pub(crate) const ACCEPT: &str = "application/json;as=Table;v=v1;g=meta.k8s.io,application/json;as=Table;v=v1beta1;g=meta.k8s.io,application/json";

/// The server's answer to [`ACCEPT`].
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ServerTable {
    #[serde(default)]
    pub(crate) metadata: ListMetadata,
    #[serde(default)]
    column_definitions: Vec<Column>,
    #[serde(default)]
    pub(crate) rows: Vec<ServerRow>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ListMetadata {
    #[serde(default)]
    pub(crate) resource_version: String,
    #[serde(default, rename = "continue")]
    pub(crate) continue_token: String,
}

#[derive(Clone, Debug, Deserialize)]
struct Column {
    name: String,
    /// 0: always shown; otherwise only in wide tables.
    #[serde(default)]
    priority: i32,
}

#[derive(Clone, Debug, Deserialize)]
pub(crate) struct ServerRow {
    #[serde(default)]
    cells: Vec<Value>,
    /// The object's metadata.
    #[serde(default)]
    pub(crate) object: Value,
}

impl ServerRow {
    pub(crate) fn metadata(&self, field: &str) -> &str {
        self.object["metadata"][field].as_str().unwrap_or("")
    }
}

/// The options for printing a server's table.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct View<'a> {
    pub(crate) wide: bool,
    /// Whether the first column is the namespace.
    pub(crate) with_namespace: bool,
    /// A prefix for each name, such as `pod/`.
    pub(crate) prefix: &'a str,
}

impl ServerTable {
    /// Appends the rows of the next page.
    pub(crate) fn extend(&mut self, next: Self) {
        self.metadata = next.metadata;
        self.rows.extend(next.rows);
    }

    /// The table without rows.
    pub(crate) fn without_rows(&self) -> Self {
        Self { rows: Vec::new(), ..self.clone() }
    }

    /// The column titles in upper case.
    pub(crate) fn titles(&self, view: View<'_>) -> Vec<String> {
        let namespace = view.with_namespace.then(|| "NAMESPACE".to_owned());
        let shown = self.column_definitions.iter().filter(|column| view.wide || column.priority == 0);
        namespace.into_iter().chain(shown.map(|column| column.name.to_uppercase())).collect()
    }

    pub(crate) fn cells(&self, row: &ServerRow, view: View<'_>) -> Vec<String> {
        let namespace = view.with_namespace.then(|| row.metadata("namespace").to_owned());
        let columns = self.column_definitions.iter().zip(&row.cells).enumerate();
        let shown = columns.filter(|(_, (column, _))| view.wide || column.priority == 0);
        namespace
            .into_iter()
            .chain(shown.map(|(at, (_, cell))| match at {
                0 => format!("{}{}", view.prefix, cell_text(cell)),
                _ => cell_text(cell),
            }))
            .collect()
    }

    pub(crate) fn render(&self, view: View<'_>) -> String {
        let rows: Vec<_> = self.rows.iter().map(|row| self.cells(row, view)).collect();
        render(&self.titles(view), &rows)
    }
}

fn cell_text(cell: &Value) -> String {
    match cell {
        Value::Null => "<none>".into(),
        Value::String(text) => text.replace('\n', " "),
        other => other.to_string(),
    }
}

/// Columns of text, separated by three spaces, without lines.
pub(crate) fn render<T: AsRef<str>>(titles: &[T], rows: &[Vec<String>]) -> String {
    render_wider(titles, rows, &mut Vec::new())
}

/// [`render`] with columns at least as wide as before, so that later rows line up.
pub(crate) fn render_wider<T: AsRef<str>>(
    titles: &[T],
    rows: &[Vec<String>],
    widths: &mut Vec<u16>,
) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    if !titles.is_empty() {
        table.set_header(titles.iter().map(AsRef::as_ref).collect::<Vec<_>>());
    }
    table.add_rows(rows.iter().cloned());
    let found = table.column_max_content_widths();
    widths.resize(widths.len().max(found.len()), 0);
    for (at, column) in table.column_iter_mut().enumerate() {
        widths[at] = widths[at].max(found[at]);
        column
            .set_padding((0, 3))
            .set_constraint(ColumnConstraint::LowerBoundary(Width::Fixed(widths[at] + 3)));
    }
    let text = table.trim_fmt();
    if text.is_empty() { text } else { text + "\n" }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn table() -> ServerTable {
        serde_json::from_value(json!({
            "kind": "Table", "metadata": {"resourceVersion": "7"},
            "columnDefinitions": [
                {"name": "Name", "type": "string", "priority": 0},
                {"name": "Replicas", "type": "integer", "priority": 0},
                {"name": "Digest", "type": "string", "priority": 1}],
            "rows": [
                {"cells": ["hello", 0, "sha256:1"], "object": {"metadata": {"namespace": "default"}}},
                {"cells": ["a-longer-name", 12, null], "object": {"metadata": {"namespace": "ns"}}}]
        }))
        .unwrap()
    }

    #[test]
    fn narrow_wide_and_with_namespaces() {
        let narrow = table().render(View::default());
        assert_eq!(narrow, "NAME            REPLICAS\nhello           0\na-longer-name   12\n");
        let wide = table().render(View { wide: true, with_namespace: true, prefix: "fn/" });
        assert_eq!(
            wide,
            "NAMESPACE   NAME               REPLICAS   DIGEST\n\
             default     fn/hello           0          sha256:1\n\
             ns          fn/a-longer-name   12         <none>\n"
        );
    }

    #[test]
    fn later_rows_line_up() {
        let mut widths = Vec::new();
        render_wider(&["NAME", "AGE"], &[vec!["a-long-name".into(), "1s".into()]], &mut widths);
        let later = render_wider::<&str>(&[], &[vec!["b".into(), "2s".into()]], &mut widths);
        assert_eq!(later, "b             2s\n");
    }
}
