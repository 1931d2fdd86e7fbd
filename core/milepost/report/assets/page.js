// The page: everything from the data is put in as text, nothing as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const single = data.runs.length === 1;

function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

function duration(seconds) {
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 60) return `${seconds < 10 ? seconds.toFixed(1) : Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const figure3 = (value) => (value === null || value === undefined ? "–" : Math.abs(value) < 1000 ? value.toFixed(3) : shortNumber(value));
const grouped = (value) => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en"));
const swatch = (number) => h("span", { class: "swatch", style: { background: `var(--c${number % 8})` } });

const parts = [];
function section(id, title, about, ...content) {
  parts.push({ id, title });
  return h("section", { id, "aria-labelledby": `${id}-title` },
    h("div", { class: "head" }, h("h2", { id: `${id}-title` }, title), about ? h("p", {}, about) : null), ...content);
}

// Summary

function tile(term, value, note) {
  return h("div", { class: "tile card" }, h("dt", {}, term), h("dd", {}, value), note ? h("p", {}, note) : null);
}

function tiles(run) {
  const found = [];
  for (const [name, e] of Object.entries(run.evaluations)) {
    const change = e.after - e.before;
    const value = e.num_evaluations > 1
      ? [h("small", {}, `${figure3(e.before)} → `), figure3(e.after)] : [figure3(e.after)];
    const sign = change > 0 ? "up" : change < 0 ? "down" : "";
    const note = e.num_evaluations > 1
      ? [h("span", { class: sign }, `${change >= 0 ? "+" : "−"}${Math.abs(change).toFixed(3)}`), `, best ${figure3(e.best)} at ${e.best_at}`] : ["one evaluation"];
    found.push(tile(`${name} accuracy`, value, h("span", {}, ...note)));
  }
  if (run.reward_last !== null) {
    found.push(tile("mean reward", [h("small", {}, `${figure3(run.reward_first)} → `), figure3(run.reward_last)], `first rollout, last ${Math.min(data.last, run.num_rollouts || data.last)}`));
  }
  const planned = run.planned_rollouts && run.planned_rollouts !== run.num_rollouts ? ` of ${run.planned_rollouts}` : "";
  found.push(tile("rollouts", [String(run.num_rollouts), h("small", {}, planned)], `${grouped(run.num_steps)} optimizer steps`));
  found.push(tile("time", duration(run.seconds), run.num_rollouts ? `${duration(run.seconds / run.num_rollouts)} a rollout` : null));
  if (run.tokens_per_gpu_per_second !== null) found.push(tile("tokens a second", grouped(run.tokens_per_gpu_per_second), "generated, by device"));
  return h("dl", { class: "tiles" }, found);
}

function figuresTable() {
  const sets = [...new Set(data.runs.flatMap((run) => Object.keys(run.evaluations)))];
  const several = data.groups.some((group) => group.runs.length > 1);
  const cell = (spread, show) => h("td", { class: "num" }, spread ? show(spread.mean) : "–",
    spread && show(spread.low) !== show(spread.high) ? h("span", { class: "range" }, `${show(spread.low)} – ${show(spread.high)}`) : null);
  const head = ["run", ...(several ? ["seeds"] : []), ...sets.flatMap((name) => [`${name} before`, "after"]), "reward", "rollouts", "time", "tokens/s"];
  const rows = data.groups.map((group) => {
    const f = group.figures;
    return h("tr", {}, h("td", { class: "name" }, swatch(group.color), group.name),
      several ? h("td", { class: "num" }, String(group.runs.length)) : null,
      sets.flatMap((name) => ["before", "after"].map((kind) => cell(f[`eval/${name}/${kind}`], figure3))),
      cell(f.reward_last, figure3), cell(f.num_rollouts, grouped), cell(f.seconds, duration), cell(f.tokens_per_gpu_per_second, grouped));
  });
  return h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "final figures" },
    h("table", { class: "data" }, h("thead", {}, h("tr", {}, head.map((text, i) => h("th", { scope: "col", class: i ? "num" : false }, text)))), h("tbody", {}, rows)));
}

function alarms() {
  const found = data.runs.flatMap((run) => run.alarms.map((alarm) => ({ ...alarm, run: run.name })));
  if (!found.length) return null;
  const items = found.map((alarm) => h("li", {}, h("strong", {}, alarm.name), single ? "" : ` in ${alarm.run}`,
    alarm.rollout === null || alarm.rollout === undefined ? "" : ` at rollout ${alarm.rollout}`, `: ${alarm.message}`));
  return h("div", { class: "alarms", role: "note" }, h("h2", {}, found.length === 1 ? "1 alarm" : `${found.length} alarms`), h("ul", {}, items));
}

function header() {
  const title = single ? data.runs[0].name : `${data.groups.length === 1 ? data.groups[0].name : data.groups.map((group) => group.name).join(", ")}`;
  const lead = single
    ? `${data.runs[0].finished ? "finished" : "not finished"}, seed ${data.runs[0].seed ?? "unknown"}, ${data.runs[0].folder}`
    : `${data.runs.length} runs; lines are means over seeds, bands their range; the reward is the mean of the last ${data.last} rollouts`;
  return [h("h1", {}, title), h("p", { class: "lead" }, lead), single ? tiles(data.runs[0]) : figuresTable(), alarms()];
}

// Curves

function describeLines(spec) {
  return spec.lines.map((line) => {
    const y = line.y.filter((value) => value !== null);
    return y.length ? `${line.label}: from ${shortNumber(y[0])} to ${shortNumber(y[y.length - 1])}` : `${line.label}: no values`;
  }).join("; ");
}

const pending = [];
function chartCard(spec, key) {
  const place = h("div", { class: "plot", role: "img", "aria-label": `${spec.title}. ${describeLines(spec)}` });
  pending.push(() => lineChart(place, spec, `${key}-${spec.axis}`));
  const meanings = spec.metrics.filter((metric) => metric.meaning);
  const shared = meanings.length > 1 && new Set(meanings.map((metric) => metric.meaning)).size > 1;
  const shown = shared ? meanings.map((metric) => `${metric.name.split("/").pop()}: ${metric.meaning}`).join(" ") : meanings.length ? meanings[0].meaning : "";
  return h("figure", { class: "card" },
    h("figcaption", {}, h("h3", {}, spec.title, spec.unit ? h("span", {}, ` ${spec.unit}`) : ""), shown ? h("p", {}, shown) : null), place);
}

function curveSection(part) {
  const legend = single ? null : h("ul", { class: "key" }, data.groups.map((group) => h("li", {}, swatch(group.color), group.name)));
  const still = part.constant.length ? h("p", { class: "still" }, "The same throughout: ",
    part.constant.flatMap((metric, i) => [i ? ", " : "", h("span", { title: metric.meaning }, h("code", {}, metric.name), ` ${shortNumber(metric.value)}`)])) : null;
  const few = part.charts.length <= 2 ? "grid few" : "grid";
  return section(part.key, part.title, part.about, part.charts.length ? legend : null,
    h("div", { class: few }, part.charts.map((spec) => chartCard(spec, part.key))), still);
}

// Timing

function shares(run) {
  const totals = run.timing.parts.map((part) => part.y.reduce((sum, y) => sum + (y || 0), 0));
  const whole = totals.reduce((sum, y) => sum + y, 0) || 1;
  const rollouts = run.timing.x.length;
  const text = (i) => `${run.timing.parts[i].name} ${(100 * totals[i] / whole).toFixed(1)} %`;
  return h("div", { class: "card shares" }, single ? null : h("h3", {}, swatch(run.color), run.name),
    h("div", { class: "stack", role: "img", "aria-label": totals.map((_, i) => text(i)).join(", ") },
      totals.map((total, i) => h("span", { title: text(i), style: { width: `${100 * total / whole}%`, background: `var(--c${i % 8})` } }))),
    h("ul", { class: "key" }, run.timing.parts.map((part, i) => h("li", {}, swatch(i), part.name, " ",
      h("b", {}, `${(100 * totals[i] / whole).toFixed(1)} %`), `, ${duration(totals[i] / rollouts)}`))));
}

function timingSection() {
  const timed = data.runs.filter((run) => run.timing);
  if (!timed.length) return null;
  const place = h("div", { class: "plot", role: "img", "aria-label": "seconds of each rollout by part" });
  if (single) pending.push(() => stackedBars(place, timed[0].timing));
  return section("timing", "Timing", "where an iteration's time goes; seconds are means over rollouts", timed.map(shares),
    single ? h("figure", { class: "card", style: { marginTop: "14px" } }, h("figcaption", {}, h("h3", {}, "Each rollout ", h("span", {}, "seconds"))), place) : null);
}

// Samples

function rewardOf(sample) {
  const value = sample.rewards.reward;
  return typeof value === "number" ? value : NaN;
}

function sampleCard(sample, best, worst) {
  const reward = rewardOf(sample);
  const grade = best > worst ? (reward === best ? "best" : reward === worst ? "worst" : "") : "";
  const others = Object.entries(sample.rewards).filter(([name]) => name !== "reward");
  const of = sample.kind === "rollout" ? `rollout ${sample.rollout}` : `${sample.kind} after rollout ${sample.rollout}`;
  return h("article", { class: "sample card" },
    h("header", {}, h("span", { class: `reward ${grade}` }, `reward ${Number.isNaN(reward) ? sample.rewards.reward ?? "–" : shortNumber(reward)}`),
      others.map(([name, value]) => h("span", {}, `${name} ${typeof value === "number" ? shortNumber(value) : value}`)),
      single ? null : h("span", {}, swatch(data.runs[sample.run].color), data.runs[sample.run].name),
      h("span", {}, of), h("span", {}, sample.status), h("span", {}, `${sample.prompt_len} + ${sample.response_len} tokens`)),
    h("dl", {}, h("dt", {}, "prompt"), h("dd", {}, h("pre", {}, sample.prompt)),
      h("dt", {}, "response"), h("dd", {}, h("pre", {}, sample.text)),
      sample.label === null ? null : [h("dt", {}, "label"), h("dd", {}, h("pre", {}, sample.label))]));
}

function options(values) {
  return values.map(([value, text]) => h("option", { value }, text));
}

function samplesSection() {
  if (!data.samples.length) return null;
  const kinds = [...new Set(data.samples.map((sample) => sample.kind))];
  const rollouts = [...new Set(data.samples.map((sample) => sample.rollout))].sort((a, b) => a - b);
  const state = { kind: "", run: "", rollout: "", order: "latest", text: "", shown: 8 };
  const list = h("div", {});
  const count = h("p", { class: "count", "aria-live": "polite" });
  const more = h("button", { type: "button", onclick: () => { state.shown += 24; update(); } }, "Show more");
  const byReward = (sample) => (Number.isNaN(rewardOf(sample)) ? -Infinity : rewardOf(sample));
  const orders = {
    latest: (a, b) => b.rollout - a.rollout, first: (a, b) => a.rollout - b.rollout,
    best: (a, b) => byReward(b) - byReward(a) || b.rollout - a.rollout, worst: (a, b) => byReward(a) - byReward(b) || b.rollout - a.rollout,
    longest: (a, b) => b.response_len - a.response_len, shortest: (a, b) => a.response_len - b.response_len,
  };
  const rewards = data.samples.map(rewardOf).filter((value) => !Number.isNaN(value));
  const best = Math.max(...rewards), worst = Math.min(...rewards);

  function update() {
    const text = state.text.toLowerCase();
    const found = data.samples.filter((sample) => (!state.kind || sample.kind === state.kind)
      && (state.run === "" || sample.run === Number(state.run)) && (state.rollout === "" || sample.rollout === Number(state.rollout))
      && (!text || [sample.prompt, sample.text, sample.label || ""].some((part) => part.toLowerCase().includes(text))));
    found.sort(orders[state.order]);
    list.replaceChildren(...found.slice(0, state.shown).map((sample) => sampleCard(sample, best, worst)));
    const kept = data.num_samples > data.samples.length ? ` (${data.num_samples} were kept in the run folder)` : "";
    count.textContent = `${Math.min(state.shown, found.length)} of ${found.length} samples${kept}`;
    more.hidden = found.length <= state.shown;
  }
  const choose = (key, label, values) => h("label", {}, label,
    h("select", { onchange: (event) => { state[key] = event.target.value; state.shown = 8; update(); } }, options(values)));
  const search = h("label", {}, "containing", h("input", { type: "search", placeholder: "text", oninput: (event) => { state.text = event.target.value; state.shown = 8; update(); } }));
  const controls = h("div", { class: "controls" },
    choose("order", "show first", [["latest", "latest"], ["best", "best reward"], ["worst", "worst reward"], ["longest", "longest"], ["shortest", "shortest"], ["first", "earliest"]]),
    kinds.length > 1 ? choose("kind", "from", [["", "training and evaluation"], ...kinds.map((kind) => [kind, kind === "rollout" ? "training" : kind])]) : null,
    single ? null : choose("run", "run", [["", "all runs"], ...data.runs.map((run, i) => [i, run.name])]),
    choose("rollout", "rollout", [["", "all"], ...rollouts.map((number) => [number, number === -1 ? "before training" : number])]), search);
  update();
  return section("samples", "Samples", "what the policy was asked, what it answered, and what that was worth", controls, count, list, more);
}

// Config

function configSection() {
  if (!data.config.length) return null;
  if (!single) return differencesSection();
  const recorded = data.config.some((row) => row.origins[0]);
  const body = h("tbody", {});
  const state = { all: !recorded, text: "" };
  function update() {
    const rows = data.config.filter((row) => (state.all || !["default", "derived"].includes(row.origins[0])) && row.path.includes(state.text));
    body.replaceChildren(...rows.map((row) => h("tr", { class: ["default", "derived", ""].includes(row.origins[0]) ? false : "given" },
      h("td", {}, h("code", {}, row.path)), h("td", { class: "value mono" }, row.values[0]), recorded ? h("td", { class: "origin" }, row.origins[0]) : null)));
  }
  update();
  const controls = h("div", { class: "controls" },
    h("label", {}, "containing", h("input", { type: "search", placeholder: "optimizer.lr", oninput: (event) => { state.text = event.target.value.trim(); update(); } })),
    recorded ? h("label", { class: "check" }, h("input", { type: "checkbox", onchange: (event) => { state.all = event.target.checked; update(); } }), "defaults and derived values too") : null);
  const about = recorded ? "every value and the file and line or flag that gave it" : "as the run resolved it";
  return section("config", "Config", about, controls, h("div", { class: "card scroll" },
    h("table", { class: "data config" }, h("thead", {}, h("tr", {}, ["setting", "value", ...(recorded ? ["origin"] : [])].map((text) => h("th", { scope: "col" }, text)))), body)));
}

function differencesSection() {
  const differing = data.config.filter((row) => new Set(row.values).size > 1 && row.path !== "run.dir");
  const rows = differing.map((row) => h("tr", {}, h("td", {}, h("code", {}, row.path)), row.values.map((value) => h("td", { class: "value mono" }, value ?? "–"))));
  const table = h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "settings that differ" },
    h("table", { class: "data" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), data.runs.map((run) => h("th", { scope: "col" }, swatch(run.color), run.name)))), h("tbody", {}, rows)));
  return section("config", "Config", "settings in which the runs differ", rows.length ? table : h("p", { class: "count" }, "none, beside the run folder"));
}

function pluginsSection() {
  if (!data.plugins.length) return null;
  const same = data.plugins.every((row) => new Set(row.versions).size === 1);
  const columns = single || same ? ["version"] : data.runs.map((run) => run.name);
  return section("plugins", "Plugins", "distributions that provided the run's parts", h("div", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "plugins" },
    h("table", { class: "data" }, h("thead", {}, h("tr", {}, ["distribution", ...columns].map((text) => h("th", { scope: "col" }, text)))),
      h("tbody", {}, data.plugins.map((row) => h("tr", {}, h("td", {}, row.name), row.versions.slice(0, columns.length).map((version) => h("td", { class: "mono" }, version ?? "–"))))))));
}

const main = h("main", {}, header());
main.append(...data.sections.filter((part) => part.key !== "perf").map(curveSection));
for (const part of [timingSection(), ...data.sections.filter((part) => part.key === "perf").map(curveSection), samplesSection(), configSection(), pluginsSection()]) {
  if (part) main.append(part);
}
main.append(h("footer", {}, `milepost ${data.version}. Drag over a chart to zoom, double-click to zoom out. Charts by uPlot (MIT licence).`));
document.getElementById("page").append(
  h("div", { class: "bar" }, h("div", {}, h("strong", {}, "milepost"), h("nav", { "aria-label": "sections" }, parts.map((part) => h("a", { href: `#${part.id}` }, part.title))))), main);
pending.forEach((start) => start());
