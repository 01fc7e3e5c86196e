"use strict";
// The description of the API.
async function showDocs() {
  document.title = "Saccade: API";
  $("ask-view").hidden = $("choice").hidden = true;
  $("docs-view").hidden = false;
  Object.assign($("link"), { href: "./", textContent: "Ask" });
  const response = await fetch("openapi.json", { headers: headers() }).catch(() => null);
  if (!response?.ok) return show($("docs-error"), response ? await sentence(response) : UNREACHED);
  const { paths, components } = await response.json();
  for (const [path, { parameters = [], ...operations }] of Object.entries(paths)) {
    for (const [method, operation] of Object.entries(operations)) {
      $("operations").append(described(`${method.toUpperCase()} ${path}`, operation, parameters, components.schemas));
    }
  }
}

const nameOf = (reference) => reference?.split("/").pop();
const typeOf = ({ type, $ref, anyOf }) =>
  type ? [type].flat().join(" or ") : nameOf($ref) ?? anyOf?.map(typeOf).join(" or ") ?? "";

function described(route, operation, ofPath, schemas) {
  const [content] = Object.values(operation.requestBody?.content ?? {});
  const { properties = {}, required = [] } = schemas[nameOf(content?.schema.$ref)] ?? content?.schema ?? {};
  const parameters = [...ofPath, ...(operation.parameters ?? [])];
  const fields = Object.entries(properties).map(([name, schema]) => (
    { name, in: "body", schema, required: required.includes(name) }));
  const rows = [...parameters, ...fields].map((one) =>
    [one.name, one.in, typeOf(one.schema), one.required ? "yes" : ""]);
  return make("details", { class: "operation" },
    make("summary", {}, make("code", {}, route), ` ${operation.summary}`),
    rows.length ? make("div", { class: "scroll" }, table(["field", "in", "type", "required"], rows)) : "No fields.");
}
