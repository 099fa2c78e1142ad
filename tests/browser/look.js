// What the tests of the report look at, in the page.

var model = (name) => Bokeh.documents[0].get_model_by_name(name);
var span = (name) => (({ start, end }) => [start, end])(model(name));

// How many pixels of a chart are painted; Bokeh's canvases lie in shadow trees.
var painted = (chart) => {
  let many = 0;
  const walk = (node) => {
    for (const one of node.querySelectorAll('*')) {
      if (one.tagName === 'CANVAS' && one.width && one.height) {
        const data = one.getContext('2d').getImageData(0, 0, one.width, one.height).data;
        for (let n = 3; n < data.length; n += 4) if (data[n]) many++;
      }
      if (one.shadowRoot) walk(one.shadowRoot);
    }
  };
  walk(document.getElementById(`chart-${chart}`));
  return many;
};

var tooltip = () => {
  const tip = [...document.querySelectorAll('.bk-Tooltip')].find((one) => getComputedStyle(one).display !== 'none');
  return tip ? tip.shadowRoot.textContent : '';
};

var asOpened = () => {
  pick.value = '0';
  pick.dispatchEvent(new Event('change'));
  document.querySelector('[data-move=all]').click();
  document.querySelectorAll('details').forEach((one) => { one.open = one.matches('section > details'); });
  window.scrollTo(0, 0);
};

// The lowest contrast of the texts of each kind of element.
var contrasts = () => {
  const light = (text) => {
    const [r, g, b, a = 1] = text.match(/[\d.]+/g).map(Number);
    const line = (v) => { v /= 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
    return { value: 0.2126 * line(r) + 0.7152 * line(g) + 0.0722 * line(b), solid: a === 1 };
  };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const found = light(getComputedStyle(one).backgroundColor);
      if (found.solid && getComputedStyle(one).backgroundColor !== 'rgba(0, 0, 0, 0)') return found.value;
    }
    return 1;
  };
  const worst = {};
  for (const one of document.querySelectorAll('main *, header *, nav *, footer')) {
    const own = [...one.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !one.getClientRects().length) continue;
    const [a, b] = [light(getComputedStyle(one).color).value, behind(one)];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = one.tagName + '.' + one.className;
    worst[name] = Math.min(worst[name] ?? 99, ratio);
  }
  return worst;
};

// The colours of the letters of an axis, and of the paper.
var axisColours = () => {
  const probe = document.body.appendChild(document.createElement('p'));
  probe.style.color = model('device-names').major_label_text_color;
  const colour = getComputedStyle(probe).color;
  probe.remove();
  return [colour, getComputedStyle(document.body).backgroundColor];
};

var reachable = () => [...document.querySelectorAll('a, button, select, input, summary, [tabindex="0"]')]
  .filter((one) => one.checkVisibility());
var reached = new Set();
var unseen = [];
var noteFocus = () => {
  const one = document.activeElement;
  reached.add(one);
  const plain = one !== document.body && getComputedStyle(one).outlineStyle === 'none';
  if (plain && !one.matches('.skip')) unseen.push(one.outerHTML.slice(0, 99));
};

// Of each table: its name, its rows, and how many of them are shown.
var rowsShown = () => [...document.querySelectorAll('table[data-fold]')].map((table) => [
  table.id, table.tBodies[0].rows.length, [...table.tBodies[0].rows].filter((row) => !row.hidden).length]);

// What would leave the page, run in it, or fail in it.
var misbehave = () => {
  window.refused = [];
  document.addEventListener('securitypolicyviolation', (event) => refused.push(event.effectiveDirective));
  fetch('http://127.0.0.1:9/').catch(() => 0);
  new Image().src = 'http://127.0.0.1:9/picture.png';
  const script = document.createElement('script');
  script.textContent = 'window.hacked = 1';
  document.body.append(script);
  setTimeout(() => { window.thrown = 1; throw new Error('on purpose'); });
};

var timesOfTimeline = () => {
  const times = model('time');
  const ticks = model('timeline').below[0].ticker.get_ticks(times.start, times.end, times, 0).major.length;
  return [document.getElementById('chart-timeline').getBoundingClientRect().width, ticks];
};

// How wide the table of tasks is, its room, and how high its first row is compared with the second.
var taskTable = () => {
  const table = document.getElementById('task-table'), box = table.parentElement;
  const [first, second] = [...table.tBodies[0].rows].map((row) => row.getBoundingClientRect().height);
  return [box.scrollWidth, box.clientWidth, first / second];
};
