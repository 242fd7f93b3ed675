// ---- the live page: it asks the server for new data

const WATCH_MS = 4000;

// The token comes behind the address's #, which no server is sent, and stays with this tab.
function watchToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    sessionStorage.setItem("token", given);
    history.replaceState(null, "", location.pathname);
  }
  return sessionStorage.getItem("token") || "";
}

async function startWatching() {
  const headers = { Authorization: `Bearer ${watchToken()}` };
  let version = "";
  const ask = async path => {
    const answer = await fetch(path, { headers });
    if (!answer.ok && answer.status !== 404) throw new Error(`${answer.status}: ${await answer.text()}`);
    return answer;
  };
  const source = new ServedSource(async path => {
    const answer = await ask(path);
    return answer.ok ? new Uint8Array(await answer.arrayBuffer()) : null;
  });
  const renew = async () => {
    const answer = await ask(`/data?have=${encodeURIComponent(version)}`);
    if (answer.status === 200) {
      const data = await answer.json();
      version = answer.headers.get("X-Version");
      render(data, source);
    }
    tellState(answer.headers.get("X-State") || "");
  };
  try {
    await renew();
  } catch (failed) {
    page.replaceChildren(node("h1", {}, "This page cannot be shown"), node("p", { class: "lead" }, String(failed.message || failed)));
    return false;
  }
  const again = async () => {
    await renew().catch(() => tellState("the server does not respond"));
    setTimeout(again, WATCH_MS);
  };
  setTimeout(again, WATCH_MS);
  return true;
}

function tellState(text) {
  const state = document.getElementById("state");
  if (state) state.textContent = text;
}
