// The studio's page. Whatever comes from a run or a person is text: nothing is ever read as HTML.
"use strict";
(async () => {
  const at = (id) => document.getElementById(id);
  const status = at("status"), body = document.documentElement;
  const given = location.hash.slice(1);
  if (given) { // the address bar and the history need not show it
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }

  function say(text, problem = false) {
    status.textContent = text;
    status.classList.toggle("problem", problem);
  }

  function made(name, text = "", attributes = {}) {
    const element = document.createElement(name);
    element.textContent = text;
    Object.entries(attributes).forEach(([key, value]) => element.setAttribute(key, value));
    return element;
  }

  async function ask(path, method = "GET", data = undefined, signal = undefined) {
    const answer = await fetch("/api/" + path, {
      method, signal, headers: { Authorization: "Bearer " + sessionStorage.getItem("token"), "Content-Type": "application/json" },
      body: data === undefined ? undefined : JSON.stringify(data),
    });
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `the studio answered ${answer.status}`);
    return answer;
  }

  // What goes wrong is said in the page, and the button works again.
  async function attempt(button, work) {
    button.disabled = true;
    try { await work(); } catch (error) { if (error.name !== "AbortError") say(error.message, true); }
    button.disabled = false;
  }

  let facts;
  try {
    facts = await (await ask("facts")).json();
  } catch (error) {
    at("facts").textContent = "";
    say(error.message, true);
    return;
  }

  // -- voices ---------------------------------------------------------------------------------------------------------
  const voices = [];

  function choices() {
    const option = (kind, id, text) => ({ value: JSON.stringify([kind, id]), text });
    return [
      ["This run", [option("anybody", "", "anybody (a new user)"), option("plain", "", "no prefix (the frozen model)")]],
      ["People of this machine", facts.people.map((person) => option("person", person.id, person.name))],
      ["Users", facts.users.map((user) => option("user", user.id, user.id))],
    ].filter(([, options]) => options.length);
  }

  function fill(select, groups) {
    const before = select.value;
    select.replaceChildren(...groups.map(([label, options]) => {
      const group = made("optgroup", "", { label });
      group.append(...options.map(({ value, text }) => made("option", text, { value })));
      return group;
    }));
    if ([...select.options].some((option) => option.value === before)) select.value = before;
  }

  function ownContext(value) {
    const [kind, id] = JSON.parse(value);
    const found = (kind === "user" ? facts.users : kind === "person" ? facts.people : []).find((one) => one.id === id);
    return (found && found.context) || facts.contexts[0] || "";
  }

  function addVoice(value, context) {
    const row = made("div", "", { class: "voice", role: "group" });
    const who = made("select"), where = made("select"), remove = made("button", "Remove", { type: "button" });
    fill(who, choices());
    if (value) who.value = value;
    facts.contexts.forEach((name) => where.append(made("option", name, { value: name })));
    const settle = () => {
      const plain = JSON.parse(who.value)[0] === "plain";
      where.value = ownContext(who.value);
      where.hidden = plain || facts.contexts.length < 2;
    };
    settle();
    if (context) where.value = context;
    who.addEventListener("change", settle);
    const voice = { row, who, where };
    remove.addEventListener("click", () => {
      const place = voices.indexOf(voice);
      voices.splice(place, 1);
      row.remove();
      number();
      (voices[Math.min(place, voices.length - 1)]?.who || at("more")).focus();
    });
    row.append(who, where, remove);
    voices.push(voice);
    at("voices").append(row);
    number();
  }

  function number() {
    voices.forEach(({ row, who, where }, place) => {
      row.setAttribute("aria-label", `Voice ${place + 1}`);
      who.setAttribute("aria-label", `Who, voice ${place + 1}`);
      where.setAttribute("aria-label", `Context, voice ${place + 1}`);
      row.lastChild.setAttribute("aria-label", `Remove voice ${place + 1}`);
      row.lastChild.disabled = voices.length === 1;
    });
    at("more").disabled = voices.length >= Number(at("more").dataset.most);
  }

  const label = ({ who, where }) => {
    const name = who.selectedOptions[0].textContent;
    return where.hidden || !where.value ? name : `${name}, ${where.value}`;
  };
  const asked = () => voices.map(({ who, where }) => {
    const [kind, id] = JSON.parse(who.value);
    return { kind, id, context: kind === "plain" ? "" : where.value };
  });

  // -- writing --------------------------------------------------------------------------------------------------------
  let running = null;

  async function* events(answer) {
    const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const [, name, data] = part.match(/^event: (.*)\ndata: (.*)$/s);
        yield [name, JSON.parse(data)];
      }
    }
  }

  async function writeTexts() {
    const prompt = at("prompt").value;
    const cards = voices.map((voice) => {
      const card = made("article", "", { class: "card", "aria-busy": "true" });
      const text = made("p");
      text.append(made("b", prompt), "");
      card.append(made("h3", label(voice)), text);
      return card;
    });
    at("cards").replaceChildren(...cards);
    running = new AbortController();
    at("stop").disabled = false;
    try {
      const settings = Object.fromEntries(["temperature", "top_p", "length", "seed"].map((id) => [id, Number(at(id).value)]));
      say("Writing …");
      const answer = await ask("texts", "POST", { prompt, voices: asked(), ...settings }, running.signal);
      for await (const [name, data] of events(answer)) {
        if (name === "problem") throw new Error(data.error);
        if (name === "making") say(`Making the model of ${label(voices[data.voice] || voices[0])} …`);
        if (name === "piece") {
          cards[data.voice].querySelector("p").lastChild.data += data.text;
          if (data.ended) cards[data.voice].setAttribute("aria-busy", "false");
        }
        if (name === "end") say(`${cards.length === 1 ? "One text is" : cards.length + " texts are"} written.`);
      }
    } finally {
      if (running.signal.aborted) say("Stopped.");
      cards.forEach((card) => card.setAttribute("aria-busy", "false"));
      at("stop").disabled = true;
    }
  }

  at("texts").addEventListener("submit", (event) => { event.preventDefault(); if (!at("go").disabled) attempt(at("go"), writeTexts); });
  at("stop").addEventListener("click", () => { running.abort(); at("go").focus(); });
  at("more").addEventListener("click", () => { addVoice(); voices.at(-1).who.focus(); });

  // -- perplexity -----------------------------------------------------------------------------------------------------
  at("judge").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(at("compare"), async () => {
      say("Comparing …");
      const found = await (await ask("perplexity", "POST", { sentence: at("sentence").value, voices: asked() })).json();
      const most = Math.max(...found.voices.map((voice) => voice.perplexity));
      const best = found.voices.reduce((a, b) => (b.perplexity < a.perplexity ? b : a));
      at("scores").tBodies[0].replaceChildren(...found.voices.map((voice) => {
        const row = made("tr"), bar = made("span", "", { class: "bar", "aria-hidden": "true" }), cell = made("td", "", { class: "wide" });
        bar.style.width = `${100 * voice.perplexity / most}%`;
        cell.append(bar);
        row.append(made("th", voice.label, { scope: "row" }), made("td", voice.perplexity.toFixed(1)), cell);
        if (voice === best) row.className = "best";
        return row;
      }));
      at("scores-note").textContent = `${found.tokens} tokens, all of them counted.`;
      at("scores").hidden = false;
      say(`Most expected of ${best.label}: perplexity ${best.perplexity.toFixed(1)}.`);
    });
  });

  // -- the map --------------------------------------------------------------------------------------------------------
  const css = (name) => getComputedStyle(body).getPropertyValue("--" + name).trim();
  const coloured = (spec) => {
    if (Array.isArray(spec)) return spec.map(coloured);
    if (spec === null || typeof spec !== "object") return spec;
    if ("theme" in spec) return css(spec.theme);
    return Object.fromEntries(Object.entries(spec).map(([key, value]) => [key, coloured(value)]));
  };
  let figures = {};

  function draw() {
    for (const name of ["users", "contexts"]) {
      const figure = coloured(figures[name]), place = at("figure-" + name);
      const axis = { gridcolor: css("line"), linecolor: css("strong") };
      place.setAttribute("aria-label", figure.label);
      place.style.height = figure.height + "px";
      Plotly.react(place, figure.data, {
        ...figure.layout, xaxis: { ...axis, ...figure.layout.xaxis }, yaxis: { ...axis, ...figure.layout.yaxis }, height: figure.height,
        font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: css("ink") }, margin: { l: 20, r: 30, t: 40, b: 20 },
        paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" }, dragmode: false,
        hoverlabel: { bgcolor: css("raised"), bordercolor: css("strong"), font: { color: css("ink") } },
      }, { responsive: true, displayModeBar: false });
    }
    at("nearest").tBodies[0].replaceChildren(...figures.rows.map((row) => {
      const line = made("tr");
      line.append(made("th", row.name, { scope: "row" }), made("td", row.nearest || "–"));
      return line;
    }));
  }

  async function drawMap() {
    figures = await (await ask("map")).json();
    at("map").hidden = !figures.users;
    if (figures.users) draw();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (figures.users) draw(); });

  // -- people ---------------------------------------------------------------------------------------------------------
  function listPeople() {
    at("people").replaceChildren(...facts.people.map((person) => {
      const line = made("li"), remove = made("button", "Delete", { type: "button", "aria-label": `Delete ${person.name}` });
      remove.addEventListener("click", () => {
        if (!remove.dataset.sure) {
          remove.dataset.sure = "yes";
          remove.textContent = `Really delete ${person.name}?`;
          remove.setAttribute("aria-label", remove.textContent);
          return;
        }
        attempt(remove, async () => {
          await ask("people/" + person.id, "DELETE");
          await refresh();
          say(`${person.name} is deleted.`);
          at("name").focus();
        });
      });
      const sentences = `${person.sentences} ${person.sentences === 1 ? "sentence" : "sentences"}`;
      line.append(made("span", `${person.name} (${[person.context, sentences].filter(Boolean).join(", ")})`), remove);
      return line;
    }));
    if (!facts.people.length) at("people").append(made("li", "Nobody yet."));
  }

  async function refresh() {
    facts = await (await ask("facts")).json();
    voices.forEach(({ who }) => fill(who, choices()));
    listPeople();
    await drawMap();
  }

  at("you").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(at("learn"), async () => {
      say("Learning …");
      const sentences = at("sentences").value.split("\n").filter((text) => text.trim());
      const person = await (await ask("people", "POST", { name: at("name").value, sentences, context: at("context").value })).json();
      at("you").reset();
      await refresh();
      if (!at("more").disabled) addVoice(JSON.stringify(["person", person.id]));
      say(`${person.name} is learned, and is among the voices.`);
    });
  });

  // -- the start ------------------------------------------------------------------------------------------------------
  const some = `${facts.method} on ${facts.data}, with ${facts.pretrained}: ${facts.users.length + facts.others} users, ${facts.contexts.length || "no"} contexts.`;
  at("facts").textContent = facts.private ? `${some} The run was made under privacy: its users are not named.` : some;
  at("folder").textContent = `They lie in ${facts.folder}.`;
  facts.contexts.forEach((name) => at("context").append(made("option", name, { value: name })));
  at("where").hidden = facts.contexts.length < 2;
  at("prompt").value = "I think";
  const first = facts.users.slice(0, 2).map((user) => JSON.stringify(["user", user.id]));
  [...first, JSON.stringify(["anybody", ""]), JSON.stringify(["plain", ""])].forEach((value) => addVoice(value));
  listPeople();
  at("studio").hidden = false;
  say("Ready.");
  await drawMap();
})();
