/** plotly brings no types of its own; what we use of it is written down in dashboard/plotly.ts. */
declare module 'plotly.js-basic-dist-min' {
  const plotly: import('./dashboard/plotly').Plotly;
  export default plotly;
}
